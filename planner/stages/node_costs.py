"""What each node of a step takes on one group of devices: read off the plan of the whole step, accumulated over its
micro-batches, on that group.

A stage computes its part of the step as that plan does, so that its seconds, and the bytes of what it stores and hands
on, are those of its instructions there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.cost.peak.memory import shard_bytes, temporaries_bytes
from shardwright.hlo import ArrayShape, Computation, Instruction
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.plans.collectives import list_collectives, node_times_s
from shardwright.plans import InstructionPlan, VariablePlan
from shardwright.shardings import Mesh, TensorSharding

#: How instructions that a rewrite adds are named: after what they serve.
_LOCAL_SUFFIX = ".local"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCosts:
    """One plan of the whole step. Seconds and bytes on one device, by entry node of the step as it was given.

    step_s: of one step, by node; a node of the micro-batches' part takes it in all of them together.
    elsewhere_s: what belongs to no node, such as reducing sums once they are complete.
    leaves: whole and shard bytes per array leaf, of one micro-batch.
    arguments_bytes, arrivals_s: per flat argument, what it takes and until it is there, where the client sends it with
    the step. inside_bytes: per node that is a loop, most that is live inside it.
    """

    micro_batches: int
    step_s: tuple[float, ...]
    elsewhere_s: float
    leaves: Mapping[tuple[int, int], tuple[float, float]]
    arguments_bytes: tuple[float, ...]
    arrivals_s: tuple[float, ...]
    inside_bytes: Mapping[int, float]

    def shard_bytes(self, leaf: tuple[int, int]) -> float:
        """Of one device, of a value that the plan has; 0 for others."""
        return self.leaves.get(leaf, (0.0, 0.0))[1]


def measure_step(
    flow: Dataflow,
    decisions: Decisions,
    instructions: Sequence[InstructionPlan],
    parameters: Sequence[VariablePlan],
    micro_batches: int,
) -> StepCosts:
    """What the nodes of `flow` take in a plan of its step accumulated over `micro_batches`."""
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
    """Most bytes that are live in the body of each loop of `flow`."""
    planned = {i.name: i for computation in decisions.graph.flow.computations for i in computation}
    nodes = [n.index for n in flow.nodes if n.instruction.opcode == "while" and n.instruction.name in planned]
    bodies = [planned[flow.nodes[i].instruction.name].called["body"][0] for i in nodes]
    prices = decisions.graph.prices
    return dict(
        zip(nodes, map(float, temporaries_bytes(bodies, instructions, prices.mesh, prices.profile)), strict=True)
    )


def _owners(flow: Dataflow) -> dict[str, int]:
    """The entry node that an instruction belongs to: itself, or the loop or branch that it is in, however deep."""
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
    found = owners.get(name)
    if found is None and _LOCAL_SUFFIX in name:
        found = owners.get(name[: name.index(_LOCAL_SUFFIX)])
    return found


def _leaves(flow: Dataflow, decisions: Decisions) -> dict[tuple[int, int], tuple[float, float]]:
    """Whole and shard bytes of every array leaf of `flow` that the plan has under the same name."""
    planned = decisions.graph.flow
    by_name = {instruction.name: leaves for instruction, leaves in planned.leaves.items()}
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for node in flow.nodes:
        leaves = by_name.get(node.instruction.name, ())
        for leaf in range(len(node.shapes)):
            position = node.leaf if node.is_value else leaf
            if position < len(leaves):
                made = leaves[position]
                shape = planned.nodes[made[0]].shapes[made[1]]
                found[node.index, leaf] = _sizes(shape, decisions.result(made), decisions.graph.prices.mesh)
    return found


def _sizes(shape: ArrayShape, sharding: TensorSharding, mesh: Mesh) -> tuple[float, float]:
    return float(shape.size_bytes), float(shard_bytes(shape.element_type, shape.dimensions, sharding, mesh))
