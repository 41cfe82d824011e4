"""What XLA:CPU stores around an all-to-all."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from shardwright.client.annotate import annotate, keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile, predict_memory
from shardwright.cost.peak.device_program_cache import DeviceProgramCache
from shardwright.cost.peak.lowering import Lowering
from shardwright.hlo import parse
from shardwright.options.user_options import plan_options
from shardwright.planner import plan
from shardwright.xla import CompileService


@pytest.mark.parametrize("rows", [1021, 1024])
def test_pieces_are_cut_out_of_what_is_filled_up_where_they_would_differ(rows: int) -> None:
    """`benchmarks/planner`: XLA:CPU has a kernel that fills a table of 30,522 rows up ahead of its all-to-all."""

    def step(a: jax.Array) -> jax.Array:
        columns = jax.lax.sort(annotate(a, {0: None, 1: "x"}), dimension=0)
        return jnp.sum(jax.lax.sort(annotate(columns, {0: "x", 1: None}), dimension=1))

    with keep_annotations():
        argument = jax.ShapeDtypeStruct((rows, 512), jnp.float32)
        text = jax.jit(step, keep_unused=True).lower(argument).as_text("hlo")
    step_plan = plan(text, Cluster.local(4), plan_options(mesh={"x": 4}))
    lowering = Lowering(
        step_plan.mesh, {entry.name: entry for entry in step_plan.instructions}, hardware_profile("cpu")
    )
    program = DeviceProgramCache(lowering).of(parse(step_plan.require_hlo()).entry)
    (exchange,) = [node for node, opcode in enumerate(program.opcodes) if opcode == "all-to-all"]
    cut = {program.operands[piece] for piece in program.operands[exchange]}
    assert len(program.operands[exchange]) == 4
    assert len(cut) == 1
    ((source,),) = cut
    assert program.opcodes[source] == ("pad" if rows % 4 else "sort")
    assert program.sizes_bytes[source] == (1024 * 512 // 4 * 4,)


def test_pieces_are_cut_out_before_it_and_put_together_behind_it(service: CompileService) -> None:
    """Rows stay for a later reader; beside them lie first what is sent and what comes, then that and the columns."""

    def step(a: jax.Array) -> jax.Array:
        rows = jax.lax.sort(annotate(a, {0: "x", 1: None}), dimension=1)
        columns = jax.lax.sort(annotate(rows, {0: None, 1: "x"}), dimension=0)
        return annotate(jnp.sum(jnp.sin(rows + jnp.sum(columns)), axis=1), {0: "x"})

    with keep_annotations():
        argument = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
        text = jax.jit(step, keep_unused=True).lower(argument).as_text("hlo")
    step_plan = plan(text, Cluster.local(4), plan_options(mesh={"x": 4}))
    program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False)
    assert program.memory is not None
    assert "all-to-all" in {collective.kind for collective in step_plan.collectives}
    assert step_plan.memory.temporaries_bytes == pytest.approx(program.memory.temporary_bytes, rel=0.001)

    cpu = hardware_profile("cpu")
    in_one = replace(
        cpu, compiler=replace(cpu.compiler, passes=tuple(p for p in cpu.compiler.passes if p != "splits_all_to_alls"))
    )
    module = parse(step_plan.require_hlo())
    whole = predict_memory(
        module, step_plan.instructions, step_plan.parameters, step_plan.outputs, step_plan.mesh, in_one
    )
    shard_bytes = 1024 * 512 // 4 * 4
    assert step_plan.memory.temporaries_bytes - whole.temporaries_bytes == pytest.approx(shard_bytes, rel=0.001)
