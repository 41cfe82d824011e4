"""Running planned programs: overhead, errors, and two processes as one mesh."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.errors import CompilationError, ExecutionError, PlanError
from shardwright.plans.plan_text import plan_to_json
from shardwright.plans.shardings import Mesh
from shardwright.xla import BoundaryArray, jax_mesh, load_program, mesh_devices, to_named_sharding
from shardwright.xla.compiling import compile_planned
from tests.xla.hand import entry, lower, names_of, plan, sharding

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)


def boundary(planned):
    return {
        "mesh": planned.mesh,
        "arguments": [BoundaryArray.of(v) for v in planned.parameters],
        "outputs": [BoundaryArray.of(v) for v in planned.outputs],
    }


def test_a_run_costs_little_python():
    """Fifty arguments: a plain jit call of the same program is the measure."""

    def step(*arrays):
        return [a + 1 for a in arrays]

    arrays = [np.ones((8, 8), np.float32)] * 50
    text = lower(step, *arrays)
    rows = dict.fromkeys(range(50), ("x", None))
    planned = plan(text, {"x": 8}, rows, rows)
    program = compile_planned(text, planned, want_executable=True)
    loaded = load_program(program.serialized, is_serialized=True, **boundary(planned))
    placed = [jax.device_put(a, s) for a, s in zip(arrays, loaded.argument_shardings, strict=True)]
    stock = jax.jit(step, in_shardings=loaded.argument_shardings, out_shardings=list(loaded.output_shardings))

    def seconds(call) -> float:
        taken = []
        for _ in range(20):
            started = time.perf_counter()
            jax.block_until_ready(call())
            taken.append(time.perf_counter() - started)
        return min(taken)

    assert seconds(lambda: loaded.run(placed)) < 1.5 * seconds(lambda: stock(*placed)) + 0.002


def test_outputs_are_ordinary_global_arrays():
    text = lower(lambda x: x * 2, X)
    planned = plan(text, {"x": 4, "y": 2}, {0: ("x", "y")}, {0: ("x", "y")})
    loaded = load_program(
        compile_planned(text, planned, want_executable=False).stablehlo.encode(),
        is_serialized=False,
        **boundary(planned),
    )
    (out,) = loaded.run([jax.device_put(X, loaded.argument_shardings[0])])
    assert out.sharding == loaded.output_shardings[0]
    assert out.aval.shape == X.shape
    assert float(jax.jit(lambda a: a.sum())(out)) == pytest.approx(2 * X.sum(), rel=1e-4)
    assert "num_partitions=8" in loaded.hlo_text()


def test_wrong_arguments_are_an_execution_error():
    text = lower(lambda x: x * 2, X)
    planned = plan(text, {"x": 8}, {0: ("x", None)}, {0: ("x", None)})
    program = compile_planned(text, planned, want_executable=True)
    loaded = load_program(program.serialized, is_serialized=True, **boundary(planned))
    right = jax.device_put(X, loaded.argument_shardings[0])
    with pytest.raises(ExecutionError, match="takes 1 arguments, 0 were given"):
        loaded.run([])
    for wrong in (jax.device_put(X), right.astype(jax.numpy.bfloat16), right[:8], right.reshape(32, 16)):
        with pytest.raises(ExecutionError, match=r"argument 0: the program takes float32\[16, 32\]"):
            loaded.run([wrong])
    (out,) = loaded.run(
        [jax.device_put(X, jax.NamedSharding(right.sharding.mesh, jax.P("x")))]
    )  # the same, spelt shorter
    assert out.shape == X.shape
    right.delete()
    with pytest.raises(ExecutionError, match="argument 0: the array was deleted or donated"):
        loaded.run([right])


def test_what_cannot_be_loaded_is_a_compilation_error():
    text = lower(lambda x: x * 2, X)
    planned = plan(text, {"x": 8}, {0: ("x", None)}, {0: ("x", None)})
    with pytest.raises(CompilationError, match="refused"):
        load_program(b"not an executable", is_serialized=True, **boundary(planned))
    with pytest.raises(CompilationError, match="refused"):
        load_program(b"not a module", is_serialized=False, **boundary(planned))


def test_a_mesh_needs_its_devices():
    with pytest.raises(PlanError, match=r"needs 16 devices, 8 are here") as raised:
        jax_mesh(Mesh.of({"x": 16}))
    assert "XLA_FLAGS" in raised.value.remedy
    grid = jax_mesh(Mesh.of({"x": 2, "y": 4}))
    assert [d.id for d in grid.devices.flat] == [d.id for d in mesh_devices()]
    with pytest.raises(PlanError, match="cannot lie as"):
        to_named_sharding(grid, sharding((None,), ("x",)))


WORKER = """
import json, sys
import jax, numpy as np
address, process, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(address, num_processes=2, process_id=process)
from shardwright.plans.plan_json import decode
from shardwright.xla import BoundaryArray, load_program
plan = decode(open(folder + "/plan.json").read())
loaded = load_program(
    open(folder + "/program.mlir", "rb").read(), is_serialized=False, mesh=plan.mesh,
    arguments=[BoundaryArray.of(v) for v in plan.parameters],
    outputs=[BoundaryArray.of(v) for v in plan.outputs], donated=[0],
)
w, x = np.load(folder + "/w.npy"), np.load(folder + "/x.npy")
place = lambda a, s: jax.make_array_from_callback(a.shape, s, lambda index: a[index])
w, x = place(w, loaded.argument_shardings[0]), place(x, loaded.argument_shardings[1])
losses = []
for _ in range(3):
    w, loss = loaded.run([w, x])
    losses.append(float(np.asarray(loss.addressable_shards[0].data)))
print(json.dumps({"losses": losses, "devices": [jax.device_count(), jax.local_device_count()],
                  "shards": [list(map(lambda i: [i.start, i.stop], s.index)) for s in w.addressable_shards]}))
"""


@pytest.mark.cluster
def test_two_processes_are_one_mesh(tmp_path):
    """Each process loads the same module; the losses are those of one device."""
    w = (np.random.default_rng(1).normal(size=(32, 32)) / 6).astype(np.float32)

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return w - 0.1 * gradient, loss

    text = lower(step, w, X, donate=(0,))
    dots = names_of(text, "dot")
    columns = [sharding((None, None)), sharding((None, "x"))]
    entries = [entry(dots[0], columns, sharding((None, "x")), opcode="dot")]
    planned = plan(text, {"x": 4, "y": 2}, {0: (None, "x"), 1: ("y", None)}, {0: (None, "x")}, entries, aliases={0: 0})
    np.save(tmp_path / "w.npy", w)
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "plan.json").write_text(plan_to_json(planned))
    (tmp_path / "program.mlir").write_text(compile_planned(text, planned, want_executable=False).stablehlo)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path.cwd()),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(process), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    results = [json.loads(out.splitlines()[-1]) if out else pytest.fail(err[-2000:]) for out, err in outputs]
    expected = []
    for _ in range(3):
        w, loss = jax.jit(step)(w, X)
        expected.append(float(loss))
    for result in results:
        assert result["devices"] == [8, 4]
        np.testing.assert_allclose(result["losses"], expected, rtol=1e-5)
    # Devices lie row-major over the mesh: process 0 holds the first half of x.
    assert {shard[1][0] or 0 for shard in results[0]["shards"]} == {0, 8}
    assert {shard[1][0] for shard in results[1]["shards"]} == {16, 24}
