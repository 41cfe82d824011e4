"""Text of one device is refused by name, text of a whole program is planned, whatever mesh either speaks of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardwright as sw
from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import parse
from shardwright.planner.graph.one_device import refuse_one_device

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
        refuse_one_device(parse(_text(body)))
    assert said in caught.value.message
    assert caught.value.where.startswith("line ")
    assert 'as_text("hlo")' in caught.value.remedy


def test_a_collective_inside_a_computation_of_its_own_is_found() -> None:
    body = """s = ((f32[8,4]), f32[64,4]) async-start(x), calls=w
    u = ((f32[8,4]), f32[64,4]) async-update(s)
    ROOT r = f32[64,4] async-done(u)"""
    with pytest.raises(UnsupportedProgramError, match="'all' is an all-gather over 8 devices"):
        refuse_one_device(parse(_text(body, before=_WRAPPED)))


@pytest.mark.parametrize(
    ("header", "entry", "said"),
    [
        (", num_partitions=8", "main.3_spmd", "the partitioner named 'main.3_spmd'"),
        ("", "main.3_spmd.1", "the partitioner named"),
        (", replica_count=8", "main", "replica_count=8"),
        (", is_scheduled=true, num_partitions=8", "main", "num_partitions=8"),
    ],
)
def test_shares_are_known_without_a_collective(header: str, entry: str, said: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=said):
        refuse_one_device(parse(_text("ROOT r = f32[8,4] tanh(x)", header, entry)))


@pytest.mark.parametrize(
    ("header", "entry"),
    [
        ("", "main"),
        (", num_partitions=8", "main"),
        (", num_partitions=1, replica_count=1, is_scheduled=true", "main"),
        (", num_partitions=8", "step_spmdify"),
    ],
)
def test_a_whole_program_is_planned_whatever_mesh_it_was_for(header: str, entry: str) -> None:
    body = "ROOT r = f32[8,4] tanh(x), sharding={devices=[8,1]<=[8]}"
    assert sw.plan(_text(body, header, entry), 8, cache=False).mesh.device_count == 8


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


def test_a_manual_region_stays_the_refusal_that_names_it() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec()
    )
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d")))
    with pytest.raises(UnsupportedProgramError, match="shard_map"):
        sw.plan(jax.jit(total).lower(x).as_text("hlo"), 8, cache=False)
