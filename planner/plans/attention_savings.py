"""What fused attention saves a plan: seconds that its calls would take longer, were they written out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import replace
from math import prod

from shardwright.attention import AttentionCall, read_call
from shardwright.cost import HardwareProfile
from shardwright.cost.attention import attention_time_s
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.planner.graph.dataflow import Node
from shardwright.planner.plans.assemble import Decisions
from shardwright.plans.attention_note import AttentionNote


def price_savings(
    notes: Iterable[AttentionNote], decisions: Decisions, profile: HardwareProfile, again: Container[int]
) -> tuple[AttentionNote, ...]:
    """`notes` with the seconds that what was replaced saves, at each place in proportion to its number.

    again: nodes of what is computed a second time.
    """
    notes = tuple(notes)
    if not any(note.replaced for note in notes):
        return notes
    module = decisions.graph.flow.module
    saved_s: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for note in notes:
        counts[note.place, note.kind] += note.count
    for node in decisions.graph.flow.nodes:
        call = None if node.is_value else read_call(node.instruction)
        if call is not None:
            kind = "backward" if call.backward else "again" if node.index in again else "forward"
            saved_s[module.place(node.instruction), kind] += node.weight * _saved_s(node, call, decisions, profile)
    return tuple(
        replace(note, saved_s=saved_s[note.place, note.kind] * note.count / counts[note.place, note.kind])
        if note.replaced
        else note
        for note in notes
    )


def _saved_s(node: Node, call: AttentionCall, decisions: Decisions, profile: HardwareProfile) -> float:
    """Seconds of one run of a call on one device: written out, less as it runs."""
    leaves = [leaf for operand in node.instruction.operands for leaf in operand.shape.leaves]
    shardings = decisions.strategies[node.index].operands
    mesh = decisions.graph.prices.mesh
    shapes = [lies.shard_shape(leaf.dimensions, mesh) for leaf, lies in zip(leaves, shardings, strict=True)]
    bits = sum(prod(shape) * ELEMENT_BITS[leaf.element_type] for shape, leaf in zip(shapes, leaves, strict=True))
    memory_s = bits / 8 / profile.memory_bandwidth_bytes_per_s
    written_out_s, as_it_runs_s = (
        attention_time_s(call, shapes, memory_s, each) for each in (replace(profile, attention=None), profile)
    )
    return max(0.0, written_out_s - as_it_runs_s)
