"""Unsplittable custom calls, and their memory on every device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.cost.peak.memory import shard_bytes
from shardwright.planner.graph.dataflow import Node
from shardwright.planner.memory.constraint import MemoryConstraint
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.rules import devices_alike, rule_of
from shardwright.reserved_names import BORDER_TARGETS, IDENTITY_TARGETS
from shardwright.units import format_bytes

#: Custom calls in a message, at most.
_MAX_NAMED = 3

#: How to have such calls split.
REMEDY = (
    "have the custom call split: put it into jax.experimental.custom_partitioning with a sharding_rule, a Pallas "
    "kernel into shardwright.partition, or write it in plain JAX (docs/custom-calls.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueCalls:
    """targets: of the largest calls, in descending order.
    size_bytes: their whole operands and results on each device.
    """

    targets: tuple[str, ...]
    size_bytes: int

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.targets))
        calls = f"custom call {names} runs" if len(self.targets) == 1 else f"custom calls {names} run"
        return (
            f"{calls} whole on every device and {'keeps' if len(self.targets) == 1 else 'keep'} "
            f"{format_bytes(self.size_bytes)} there"
        )


def find_opaque_calls(peak: MemoryConstraint, decisions: Decisions) -> OpaqueCalls | None:
    """The unsplit custom calls; None without any.

    Their bytes: the operands and results of the largest call or, if more, all of their results live at the peak.
    """
    flow = decisions.graph.flow
    at_once: dict[str, int] = {}
    for node in flow.nodes:
        if _is_opaque(node, decisions):
            target = node.instruction.get("custom_call_target", "")
            at_once[target] = max(at_once.get(target, 0), sum(_unsplit_bytes(node, decisions)))
    if not at_once:
        return None
    bytes_by_target: dict[str, int] = {}
    for index, leaf in peak.values:
        node = flow.nodes[index]
        if _is_opaque(node, decisions):
            target, shape = node.instruction.get("custom_call_target", ""), node.shapes[leaf]
            bytes_by_target[target] = bytes_by_target.get(target, 0) + shape.size_bytes
    largest = {target: max(size, bytes_by_target.get(target, 0)) for target, size in at_once.items()}
    ordered = sorted(largest, key=lambda target: (-largest[target], target))
    telling = [target for target in ordered if 10 * largest[target] >= largest[ordered[0]]]
    return OpaqueCalls(
        targets=tuple(telling[:_MAX_NAMED]), size_bytes=max(*at_once.values(), sum(bytes_by_target.values()))
    )


def _is_opaque(node: Node, decisions: Decisions) -> bool:
    instruction = node.instruction
    if node.is_value or instruction.opcode != "custom-call":
        return False
    target = instruction.get("custom_call_target", "")
    place = decisions.graph.builder.rules.inside.places.get(instruction)
    if place is not None and devices_alike(decisions.graph.prices.mesh, place) == 1:
        return False  # in a manual region: one device's part
    return target not in IDENTITY_TARGETS | BORDER_TARGETS and not rule_of(instruction).factors


def _unsplit_bytes(node: Node, decisions: Decisions) -> Iterator[int]:
    """Bytes of each operand and result on a device; a repeated operand counts once."""
    mesh, strategy = decisions.graph.prices.mesh, decisions.strategies[node.index]
    leaves = [(operand, leaf) for operand in node.instruction.operands for leaf in operand.shape.leaves]
    for (_, shape), used in dict(zip(leaves, strategy.operands, strict=True)).items():
        yield shard_bytes(shape.element_type, shape.dimensions, used, mesh)
    for leaf, shape in enumerate(node.shapes):
        yield shard_bytes(shape.element_type, shape.dimensions, decisions.result((node.index, leaf)), mesh)
