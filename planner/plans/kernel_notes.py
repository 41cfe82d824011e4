"""How much of a plan is kernels of the program's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.attention import read_call
from shardwright.cost import HardwareProfile, compute_time_s, is_free
from shardwright.cost.kernels import kernel_price
from shardwright.hlo import ArrayShape, Instruction
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.kernels import NAME_ATTRIBUTE
from shardwright.kernels.ragged import read_ragged
from shardwright.placements import read_placement
from shardwright.planner.graph.dataflow import Node
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.rules import devices_alike, rule_of
from shardwright.planner.tuning import MIN_KERNEL_SHARE
from shardwright.plans.kernel_note import KernelNote

_KERNEL_NAME = re.compile(r',\s*name = "([\w.]+)"')


def note_kernels(
    decisions: Decisions, profile: HardwareProfile, *, step_s: float, peak_bytes: int
) -> tuple[KernelNote, ...]:
    """A note for each line and name of custom calls that hold more than a few per cent of the step or of the memory,
    the largest first."""
    groups: dict[KernelNote, _Held] = {}
    for node in decisions.graph.flow.nodes:
        note = _note(node, decisions)
        if note is not None:
            held = groups.setdefault(note, _Held())
            held.count += 1
            time_s, size_bytes = _held_by(node, decisions, profile)
            held.time_s += node.weight * time_s
            held.size_bytes = max(held.size_bytes, size_bytes)
    notes = [
        replace(
            note,
            count=held.count,
            step_share=held.time_s / step_s if step_s > 0 else 0.0,
            memory_share=min(1.0, held.size_bytes / peak_bytes) if peak_bytes > 0 else 0.0,
        )
        for note, held in groups.items()
    ]
    large = [note for note in notes if max(note.step_share, note.memory_share) > MIN_KERNEL_SHARE]
    return tuple(sorted(large, key=lambda note: -max(note.step_share, note.memory_share)))


@dataclass(slots=True)
class _Held:
    """Of equal calls: their number, seconds a step, and the bytes of one of them on a device."""

    count: int = 0
    time_s: float = 0.0
    size_bytes: float = 0.0


def _note(node: Node, decisions: Decisions) -> KernelNote | None:
    """What there is to say of a call; None of anything else, of attention, and of ragged products."""
    instruction = node.instruction
    if node.is_value or instruction.opcode != "custom-call" or is_free(instruction):
        return None
    if read_call(instruction) or read_placement(instruction) is not None or read_ragged(instruction):
        return None
    price = kernel_price(instruction, [leaf.dimensions for leaf in _operands(node)])
    graph = decisions.graph
    alike = devices_alike(graph.prices.mesh, graph.builder.rules.inside.places.get(instruction))
    whole = not rule_of(instruction).factors and alike > 1
    return KernelNote(
        place=decisions.graph.flow.module.place(instruction),
        name=_name(instruction),
        count=1,
        whole=whole,
        price=price.source if price else "",
        step_share=0.0,
        memory_share=0.0,
    )


def _name(call: Instruction) -> str:
    """That of a partitioned kernel's function, or a Triton kernel's in its configuration; else the call's target."""
    name = call.get("frontend_attributes", {}).get(NAME_ATTRIBUTE)
    if name is not None:
        return str(name)
    match = _KERNEL_NAME.search(call.get("backend_config") or "")
    return match[1] if match else call.get("custom_call_target", "")


def _held_by(node: Node, decisions: Decisions, profile: HardwareProfile) -> tuple[float, float]:
    """(seconds, bytes of operands and results) of one run of a call on one device."""
    mesh, strategy = decisions.graph.prices.mesh, decisions.strategies[node.index]
    operand_shapes, result_shapes = (
        [lies.shard_shape(leaf.dimensions, mesh) for leaf, lies in zip(leaves, shardings, strict=True)]
        for leaves, shardings in ((_operands(node), strategy.operands), (node.shapes, strategy.results))
    )
    sizes = [*_sizes(_operands(node), operand_shapes), *_sizes(node.shapes, result_shapes)]
    return compute_time_s(node.instruction, operand_shapes, result_shapes, profile), sum(sizes)


def _operands(node: Node) -> list[ArrayShape]:
    return [leaf for operand in node.instruction.operands for leaf in operand.shape.leaves]


def _sizes(leaves: Sequence[ArrayShape], shapes: Sequence[tuple[int, ...]]) -> Iterator[float]:
    return (prod(shape) * ELEMENT_BITS[leaf.element_type] / 8 for leaf, shape in zip(leaves, shapes, strict=True))
