"""Signatures: instructions with equal ones have the same strategies and costs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from shardwright.attention import read_call
from shardwright.hlo import Computation, Instruction
from shardwright.kernels import KERNEL_TARGET, RULE_ATTRIBUTE, read_price
from shardwright.placements import computes_on_host, read_placement

#: Attributes that say nothing about what an instruction computes.
_IRRELEVANT = frozenset({"metadata", "frontend_attributes", "sharding", "backend_config", "origin"})

#: Those of them that are irrelevant to library calls, too.
_COMMENTS = frozenset({"metadata", "sharding", "origin"})


def signature(instruction: Instruction) -> Hashable:
    """All that strategies depend on: opcode, shapes, attributes, and the applied regions' computations."""
    called = instruction.called
    return (
        instruction.opcode,
        tuple(leaf for operand in instruction.operands for leaf in operand.shape.leaves),
        # a sum from 5 is split otherwise than one from 0
        tuple(o.payload if o.opcode == "constant" else None for o in instruction.operands),
        instruction.shape.leaves,
        tuple((a.name, a.text) for a in instruction.attributes.values() if _counts(a.name, called)),
        _call_attributes(instruction) if instruction.opcode == "custom-call" else None,
        computes_on_host(instruction),
        tuple(_region_signature(region) for regions in called.values() for region in regions),
    )


def identity(instruction: Instruction) -> Hashable:
    """A cheaper, finer key than `signature`: identities of an instruction's components.

    A parser shares one object among equal shapes and attributes. Valid while one of its instructions lives.
    """
    return (
        instruction.opcode,
        id(instruction.shape),
        tuple([(id(o.shape), o.payload if o.opcode == "constant" else None) for o in instruction.operands]),
        tuple([id(a) for a in instruction.attributes.values() if a.name not in _COMMENTS]),
        *[id(region) for regions in instruction.called.values() for region in regions],
    )


def _counts(name: str, called: Mapping[str, object]) -> bool:
    """Whether the text of an attribute of this name counts; called computations count by content."""
    return name not in _IRRELEVANT and name not in called


def _call_attributes(call: Instruction) -> Hashable:
    """What counts of a custom call's frontend attributes and configuration: an attention, or a declared batch and
    dimensions (`rules.batched`), a price and a kernel's forms."""
    attention = read_call(call)
    if attention is not None:
        return attention
    placement = read_placement(call)
    if placement is not None:
        return placement
    said = dict(call.get("frontend_attributes", {}))
    forms = call.get("backend_config") if call.get("custom_call_target") == KERNEL_TARGET else None
    return said.get("num_batch_dims"), said.get(RULE_ATTRIBUTE), read_price(call), forms


def _region_signature(region: Computation) -> Hashable:
    """A region's computation, independent of names: every instruction, literal and operand."""
    places = {instruction: place for place, instruction in enumerate(region)}
    wired = tuple((signature(i), i.index, i.payload, tuple(places[o] for o in i.operands)) for i in region)
    return wired, places[region.root]
