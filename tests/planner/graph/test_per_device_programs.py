"""Text of one device is refused by name, text of a whole program is planned, whatever mesh either speaks of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardwright as sw
from shardwright.cli import main
from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import parse
from shardwright.planner.graph.per_device_programs import refuse_per_device_program

_ADD = "add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }\n"
_X = "x = f32[8,4]{1,0} parameter(0)\n"


def _text(body: str, header: str = "", entry: str = "main", before: str = _ADD) -> str:
    return f"HloModule m{header}\n{before}ENTRY {entry} {{\n{_X}{body}\n}}\n"


_GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
_WRAPPED = f"""w {{
  p = f32[8,4]{{1,0}} parameter(0)
  ROOT all = f32[64,4]{{1,0}} all-gather(p), {_GROUPS}, dimensions={{0}}
}}
"""

#: What stands for one device, and what the message says of it.
_REFUSED = {
    "all-reduce": (f"ROOT r = f32[8,4] all-reduce(x), {_GROUPS}, to_apply=add", "'r' is an all-reduce over 8 devices"),
    "all groups of devices": ("ROOT r = f32[8,4] all-reduce(x), replica_groups={}, to_apply=add", "between devices"),
    "iota groups": ("ROOT r = f32[8,4] all-reduce(x), replica_groups=[2,4]<=[8], to_apply=add", "over 4 devices"),
    "mesh groups": (
        "ROOT r = f32[8,4] all-reduce(x), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=add",
        "over 4 devices",
    ),
    "all-gather": (f"ROOT r = f32[64,4] all-gather(x), {_GROUPS}, dimensions={{0}}", "an all-gather"),
    "reduce-scatter": (
        f"ROOT r = f32[1,4] reduce-scatter(x), {_GROUPS}, dimensions={{0}}, to_apply=add",
        "a reduce-scatter",
    ),
    "all-to-all": (f"ROOT r = f32[8,4] all-to-all(x), {_GROUPS}, dimensions={{0}}", "an all-to-all"),
    "permute": (
        "ROOT r = f32[8,4] collective-permute(x), source_target_pairs={{0,1},{1,0}}",
        "a collective-permute between devices",
    ),
    "broadcast": (f"ROOT r = f32[8,4] collective-broadcast(x), {_GROUPS}", "a collective-broadcast"),
    "started": (
        f"v = f32[8,4] all-reduce-start(x), {_GROUPS}, to_apply=add\nROOT r = f32[8,4] all-reduce-done(v)",
        "'v' is an all-reduce-start over 8 devices",
    ),
    "partition-id": ("i = u32[] partition-id()\nROOT r = (f32[8,4], u32[]) tuple(x, i)", "(partition-id)"),
    "replica-id": ("i = u32[] replica-id()\nROOT r = (f32[8,4], u32[]) tuple(x, i)", "(replica-id)"),
    "received": (
        """t = token[] after-all()
        v = (f32[8,4], u32[], token[]) recv(t), channel_id=1
        d = (f32[8,4], token[]) recv-done(v), channel_id=1
        ROOT r = f32[8,4] get-tuple-element(d), index=0""",
        "'v' is a recv between devices",
    ),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_what_speaks_of_devices_is_refused_by_name(kind: str) -> None:
    body, said = _REFUSED[kind]
    with pytest.raises(UnsupportedProgramError) as caught:
        refuse_per_device_program(parse(_text(body)))
    assert said in caught.value.message
    assert caught.value.where.startswith("line ")
    assert 'as_text("hlo")' in caught.value.remedy


def test_a_collective_inside_a_computation_of_its_own_is_found() -> None:
    body = """s = ((f32[8,4]), f32[64,4]) async-start(x), calls=w
    u = ((f32[8,4]), f32[64,4]) async-update(s)
    ROOT r = f32[64,4] async-done(u)"""
    with pytest.raises(UnsupportedProgramError, match="'all' is an all-gather over 8 devices"):
        refuse_per_device_program(parse(_text(body, before=_WRAPPED)))


@pytest.mark.parametrize(
    ("header", "entry", "message"),
    [
        (", num_partitions=8", "main.3_spmd", "the partitioner named 'main.3_spmd'"),
        ("", "main.3_spmd.1", "the partitioner named"),
        ("", "main_spmd", "the partitioner named"),
        (", num_partitions=8", "main_spmd.5", "the partitioner named"),
        (", replica_count=8", "main", "replica_count=8"),
        (", is_scheduled=true, num_partitions=8", "main", "num_partitions=8"),
    ],
)
def test_shares_are_known_without_a_collective(header: str, entry: str, message: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=message):
        refuse_per_device_program(parse(_text("ROOT r = f32[8,4] tanh(x)", header, entry)))


@pytest.mark.parametrize(
    ("header", "entry"),
    [
        ("", "main"),
        (", num_partitions=8", "main"),
        (", num_partitions=1, replica_count=1, is_scheduled=true", "main"),
        (", num_partitions=8", "step_spmdify"),
        (", is_scheduled=false, num_partitions=8", "main"),
        ("", "step_spmd.12"),
    ],
)
def test_a_whole_program_is_planned_whatever_mesh_it_was_for(header: str, entry: str) -> None:
    body = "ROOT r = f32[8,4] tanh(x), sharding={devices=[8,1]<=[8]}"
    assert sw.plan(_text(body, header, entry), 8, cache=False).mesh.device_count == 8


def test_a_function_of_a_users_own_may_be_called_spmd() -> None:
    before = "loss_spmd.5 { p = f32[8,4]{1,0} parameter(0) ROOT t = f32[8,4]{1,0} tanh(p) }\n"
    refuse_per_device_program(
        parse(_text("ROOT r = f32[8,4] call(x), to_apply=loss_spmd.5", ", num_partitions=8", before=before))
    )


def _step(x: Any, w: Any, v: Any) -> Any:
    return jnp.tanh(x @ w) @ v


@pytest.mark.parametrize("axes", [("d", None, None), (None, "d", None)], ids=["data", "tensor"])
def test_what_jax_prints_before_and_after_partitioning(axes: tuple[str | None, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    x, w, v = axes
    specs = PartitionSpec(x), PartitionSpec(None, w), PartitionSpec(w or v)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (32, 64), (64, 32))]
    lowered = jax.jit(_step, in_shardings=[NamedSharding(mesh, spec) for spec in specs]).lower(*arrays)
    assert sw.plan(lowered.as_text("hlo"), 8, cache=False).mesh.device_count == 8
    with pytest.raises(UnsupportedProgramError, match="the program of one device"):
        sw.plan(lowered.compile().as_text(), 8, cache=False)


def test_the_command_names_the_file_and_plans_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.hlo"
    path.write_text(_text(_REFUSED["all-reduce"][0], ", num_partitions=8"))
    assert main(["plan", str(path), "--cluster", "8", "--no-cache", "--explain"]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert f"error: {path}: line 5: the text is the program of one device" in printed.err


def test_collectives_of_a_manual_region_are_no_evidence_and_others_beside_it_are() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec()
    )
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d")))
    text = jax.jit(lambda x: total(x) * 2).lower(x).as_text("hlo")
    refuse_per_device_program(parse(text))
    lines = text.splitlines()
    ends = max(number for number, line in enumerate(lines) if line.lstrip().startswith("ROOT"))
    lines.insert(ends, "  own = u32[] partition-id()")
    with pytest.raises(UnsupportedProgramError, match="the number of the device"):
        refuse_per_device_program(parse("\n".join(lines)))


_DUMPED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("d",))
split = NamedSharding(mesh, PartitionSpec("d"))
jax.jit(lambda x: jnp.tanh(x) * 2, in_shardings=split).lower(jax.ShapeDtypeStruct((8, 4), jnp.float32)).compile()
"""


def test_what_xla_dumps_is_refused_from_partitioning_on(tmp_path: Path) -> None:
    """Nothing in this program speaks of devices: batch and mesh alone are split."""
    flags = f"--xla_force_host_platform_device_count=8 --xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=.*"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", _DUMPED], env=environment, check=True, timeout=120)
    texts = [path.read_text() for path in sorted(tmp_path.glob("*jit__lambda*.txt"))]
    modules = [parse(text) for text in texts if text.startswith("HloModule")]
    sizes = [module.entry.parameters[0].shape.leaves[0].dimensions for module in modules]
    assert set(sizes) == {(8, 4), (1, 4)}  # the whole batch, and one device's share
    for module, size in zip(modules, sizes, strict=True):
        if size == (8, 4):
            refuse_per_device_program(module)
            continue
        with pytest.raises(UnsupportedProgramError, match="the program of one device"):
            refuse_per_device_program(module)
