"""Costs of each node of a step on one group of devices, from the plan of the whole accumulated step on this group.

A stage computes its part of the step in the same way: its seconds, stored bytes and transferred bytes are those of its
instructions in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.cost.peak.memory import shard_bytes, temporaries_bytes
from shardwright.hlo import ArrayShape, Computation, Instruction
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.plans.collectives import list_collectives, node_times_s
from shardwright.plans.plan import InstructionPlan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding

#: Suffix of instructions added by a rewrite, after the name of the instruction they serve.
_LOCAL_SUFFIX = ".local"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCosts:
    """One plan of the whole step. Seconds and bytes on one device, by entry node of the given step.

    micro_batches: number of micro-batches of the plan.
    step_s: seconds of one step, by node; nodes run per micro-batch: over all micro-batches.
    elsewhere_s: seconds of no node, such as the reduction of complete sums.
    leaves: array leaf → whole and shard bytes, of one micro-batch.
    arguments_bytes: bytes per flat argument.
    arrivals_s: seconds per flat argument until it arrives, if sent by the client with the step.
    inside_bytes: loop node → peak bytes live inside it.
    """

    micro_batches: int
    step_s: tuple[float, ...]
    elsewhere_s: float
    leaves: Mapping[tuple[int, int], tuple[float, float]]
    arguments_bytes: tuple[float, ...]
    arrivals_s: tuple[float, ...]
    inside_bytes: Mapping[int, float]

    def shard_bytes(self, leaf: tuple[int, int]) -> float:
        """Bytes of a planned value on one device; 0 if not in the plan."""
        return self.leaves.get(leaf, (0.0, 0.0))[1]


def measure_step(
    flow: Dataflow,
    decisions: Decisions,
    instructions: Sequence[InstructionPlan],
    parameters: Sequence[VariablePlan],
    micro_batches: int,
) -> StepCosts:
    """The costs of the nodes of `flow` in a plan of its step accumulated over `micro_batches`."""
    mesh = decisions.graph.prices.mesh
    owners = _owners(flow)
    step_s, elsewhere_s = [0.0] * len(flow.nodes), 0.0
    spent = [(node.instruction.name, seconds) for node, seconds in node_times_s(decisions)]
    spent += [(collective.instruction, collective.time_s) for collective in list_collectives(decisions)]
    for name, seconds in spent:
        owner = _owner(owners, name)
        if owner is None:
            elsewhere_s += seconds
        else:
            step_s[owner] += seconds
    return StepCosts(
        micro_batches=micro_batches,
        step_s=tuple(step_s),
        elsewhere_s=elsewhere_s,
        leaves=_leaves(flow, decisions),
        arguments_bytes=tuple(
            float(shard_bytes(v.element_type, v.stored_shape, v.stored_sharding, mesh)) for v in parameters
        ),
        arrivals_s=tuple(_arrivals_s(decisions)),
        inside_bytes=_inside(flow, decisions, instructions),
    )


def _arrivals_s(decisions: Decisions) -> Iterator[float]:
    graph = decisions.graph
    for node in graph.flow.parameters:
        shape = graph.flow.nodes[node].shapes[0]
        yield graph.prices.arrival_s(shape, decisions.result((node, 0))) if node in graph.fed_arguments else 0.0


def _inside(flow: Dataflow, decisions: Decisions, instructions: Sequence[InstructionPlan]) -> dict[int, float]:
    """Peak live bytes in the body of each loop of `flow`."""
    planned = {i.name: i for computation in decisions.graph.flow.computations for i in computation}
    nodes = [n.index for n in flow.nodes if n.instruction.opcode == "while" and n.instruction.name in planned]
    bodies = [planned[flow.nodes[i].instruction.name].called["body"][0] for i in nodes]
    prices = decisions.graph.prices
    return dict(
        zip(nodes, map(float, temporaries_bytes(bodies, instructions, prices.mesh, prices.profile)), strict=True)
    )


def _owners(flow: Dataflow) -> dict[str, int]:
    """The entry node of an instruction: itself, or its enclosing loop or branch, at any depth."""
    owners: dict[str, int] = {}
    for node in flow.nodes:
        if node.is_value:
            continue
        todo: list[Instruction] = [node.instruction]
        seen: set[Computation] = set()
        while todo:
            instruction = todo.pop()
            owners.setdefault(instruction.name, node.index)
            for callees in instruction.called.values():
                for callee in callees:
                    if callee not in seen:
                        seen.add(callee)
                        todo += callee.instructions
    return owners


def _owner(owners: Mapping[str, int], name: str) -> int | None:
    owner = owners.get(name)
    if owner is None and _LOCAL_SUFFIX in name:
        owner = owners.get(name[: name.index(_LOCAL_SUFFIX)])
    return owner


def _leaves(flow: Dataflow, decisions: Decisions) -> dict[tuple[int, int], tuple[float, float]]:
    """Whole and shard bytes of every array leaf of `flow` with the same name in the plan."""
    planned = decisions.graph.flow
    by_name = {instruction.name: leaves for instruction, leaves in planned.leaves.items()}
    sizes: dict[tuple[int, int], tuple[float, float]] = {}
    for node in flow.nodes:
        leaves = by_name.get(node.instruction.name, ())
        for leaf in range(len(node.shapes)):
            position = node.leaf if node.is_value else leaf
            if position < len(leaves):
                planned_leaf = leaves[position]
                shape = planned.nodes[planned_leaf[0]].shapes[planned_leaf[1]]
                sizes[node.index, leaf] = _sizes(shape, decisions.result(planned_leaf), decisions.graph.prices.mesh)
    return sizes


def _sizes(shape: ArrayShape, sharding: TensorSharding, mesh: Mesh) -> tuple[float, float]:
    return float(shape.size_bytes), float(shard_bytes(shape.element_type, shape.dimensions, sharding, mesh))
