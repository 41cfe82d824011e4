"""The compile child: programs come back, and whatever happens to it the service lives on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from shardwright.errors import CompilationAbortedError, CompilationError, DeadlineError, PlanError
from shardwright.user_plans import compile_and_prove
from shardwright.xla import BoundaryArray, CompileService, load_program
from shardwright.xla.child import child_environment
from tests.xla.hand import entry, lower, names_of, plan, sharding

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
HLO = lower(lambda x, w: x @ w, X, X.T)
(DOT,) = names_of(HLO, "dot")
PLAN = plan(
    HLO,
    {"x": 4, "y": 2},
    {0: (None, "x"), 1: ("x", None)},
    {},
    [entry(DOT, [sharding((None, "x")), sharding(("x", None))], sharding((None, None)), ("x",), opcode="dot")],
)

#: What emission takes care to strip: a mark of the user's that names an axis our mesh lacks.
LEFTOVER = """
sdy.mesh @mesh = <["x"=8]>
func.func @main(%a: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @Sharding(%a) {backend_config = "", mhlo.frontend_attributes =
    {xla.sdy.sharding = "#sdy.sharding_per_value<[<@mesh, [{\\22d\\22}]>]>"}} : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""


@pytest.fixture(scope="module")
def service():
    with CompileService(8) as service:
        yield service


def test_a_program_compiled_elsewhere_runs_here(service):
    """The executable crosses processes; the text of the same program does as well."""
    program = service.compile(HLO, PLAN)
    (collective,) = program.collectives
    assert (collective.kind, collective.group_size, collective.group_count, collective.op_name) == (
        "all-reduce", 4, 2, DOT
    )  # fmt: skip
    assert collective.payload_bytes == 16 * 16 * 4
    assert collective.wire_bytes == 2 * 3 * 16 * 16 * 4 // 4
    assert program.memory.argument_bytes == 2 * 16 * 32 * 4 // 4
    assert program.memory.output_bytes >= 16 * 16 * 4
    for payload, is_serialized in ((program.serialized, True), (program.stablehlo.encode(), False)):
        loaded = load_program(
            payload,
            is_serialized=is_serialized,
            mesh=PLAN.mesh,
            arguments=[BoundaryArray.of(v) for v in PLAN.parameters],
            outputs=[BoundaryArray.of(v) for v in PLAN.outputs],
        )
        import jax

        arrays = [jax.device_put(a, lies) for a, lies in zip((X, X.T), loaded.argument_shardings, strict=True)]
        np.testing.assert_allclose(np.asarray(loaded.run(arrays)[0]), X @ X.T, rtol=1e-4, atol=1e-4)


def test_an_abort_of_xla_is_a_typed_error_and_the_next_request_works(service):
    with pytest.raises(CompilationAbortedError, match=r"SIGABRT(.|\n)*unknown (axis name: d|mesh)") as raised:
        service.compile_stablehlo(LEFTOVER)
    assert len(str(raised.value)) < 2000
    assert "all-reduce" in service.compile_stablehlo(service.emit(HLO, PLAN))


def test_what_xla_refuses_is_a_typed_error_and_the_child_lives(service):
    service.emit(HLO, PLAN)
    (child,) = service._idle
    with pytest.raises(CompilationError, match="XLA refused the program"):
        service.compile_stablehlo("func.func @main( {")
    absent = plan(HLO, {"x": 8}, entries=[entry("gone.1", [], sharding(()))])
    with pytest.raises(PlanError, match="is not in the program"):
        service.compile(HLO, absent)
    with pytest.raises(PlanError):
        service.compile(HLO + "\n", PLAN)  # not the text the plan was made for
    assert service._idle == [child]


def test_a_deadline_ends_the_child_and_the_next_request_works(service):
    with pytest.raises(DeadlineError):
        service.compile(HLO, PLAN, deadline_s=0.001)
    assert not service._idle
    assert service.emit(HLO, PLAN).count("sdy.mesh") == 1


def test_the_partitioner_alone(service):
    program = service.compile(HLO, PLAN, inspect="partition-pass")
    assert program.serialized is None
    assert program.memory is None
    assert [(c.kind, c.group_size, c.op_name) for c in program.collectives] == [("all-reduce", 4, DOT)]


def test_one_child_partitions_small_programs_one_after_the_other(service):
    children = set()
    for _ in range(3):
        assert service.compile(HLO, PLAN, inspect="partition-pass").collectives
        children.update(service._idle)
    assert len(children) == 1


def test_the_next_program_is_not_blamed_for_the_end_of_xla_in_the_one_before(service):
    expected = service.compile(HLO, PLAN, inspect="partition-pass").collectives
    service._idle[0]._process.kill()
    assert service.compile(HLO, PLAN, inspect="partition-pass").collectives == expected


def test_closing_leaves_no_process_and_no_files():
    service = CompileService(2)
    service.emit(HLO, PLAN)
    process, folder = psutil.Process(service._idle[0]._process.pid), Path(service._idle[0]._folder)
    assert folder.is_dir()
    service.close()
    assert not process.is_running()
    assert not folder.exists()
    service.close()


def test_the_child_ends_with_its_parent_and_leaves_no_files(tmp_path):
    """Even with one that is killed."""
    script = (
        "import os, sys\n"
        "from shardwright.xla.child import CompileChild\n"
        "child = CompileChild(2, 'cpu')\n"
        "print(child._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TMPDIR": str(tmp_path)}
    parent = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    pid = int(parent.stdout)
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            assert not list(tmp_path.iterdir())
            return
        time.sleep(0.05)
    pytest.fail("the compile child outlived its parent")


def test_a_child_that_cannot_start_says_so_and_leaves_no_files(tmp_path):
    script = (
        "import os\n"
        "from shardwright.xla import CompileService\n"
        "os.environ['PYTHONHOME'] = '/nowhere'  # no Python starts there\n"
        "CompileService(2).compile_stablehlo('')\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert "PlatformError: the compile child does not start" in parent.stderr
    assert not list(tmp_path.iterdir())


def test_the_service_loads_neither_jax_nor_mlir():
    script = "import sys; from shardwright.xla import CompileService; CompileService(8); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_childs_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_cpu_enable_fast_math=false")
    environment = child_environment(16, "cpu")
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["XLA_FLAGS"].split() == [
        "--xla_cpu_enable_fast_math=false",
        "--xla_force_host_platform_device_count=16",
    ]
    on_gpus = child_environment(16, "cuda", gpu_ids=(2, 3))
    assert "device_count" not in on_gpus["XLA_FLAGS"]
    assert on_gpus["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert on_gpus["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"  # it reserves nothing of what an executor needs


def test_a_program_for_one_device_is_read_though_nothing_partitions_it():
    whole = sharding((None, None))
    alone = plan(HLO, {"x": 1}, {}, {}, [entry(DOT, [whole, whole], whole, opcode="dot")])
    proof = compile_and_prove(alone)
    assert proof.holds
    assert proof.lines == ()
