"""Which instructions are alike for the search: those that no rule and no price can tell apart."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from shardwright.hlo import Computation, Instruction

#: Attributes that say nothing about what an instruction computes.
_IRRELEVANT = frozenset({"metadata", "frontend_attributes", "sharding", "backend_config", "origin"})

#: Those of them that say nothing of library calls, either.
_COMMENTS = frozenset({"metadata", "sharding", "origin"})


def signature(instruction: Instruction) -> Hashable:
    """What strategies depend on: opcode, shapes, attributes, and what the applied regions compute."""
    called = instruction.called
    return (
        instruction.opcode,
        tuple(leaf for operand in instruction.operands for leaf in operand.shape.leaves),
        # a sum from 5 is split otherwise than one from 0
        tuple(o.payload if o.opcode == "constant" else None for o in instruction.operands),
        instruction.shape.leaves,
        tuple((a.name, a.text) for a in instruction.attributes.values() if _counts(a.name, called)),
        _batching_attributes(instruction) if instruction.opcode == "custom-call" else None,
        tuple(_region_signature(region) for regions in called.values() for region in regions),
    )


def identity(instruction: Instruction) -> Hashable:
    """Quicker to make than `signature`, and of the same instructions at most: what they are made of, by identity.

    A parser gives one object for equal shapes and attributes. Good while an instruction that it was made of lives.
    """
    return (
        instruction.opcode,
        id(instruction.shape),
        tuple([(id(o.shape), o.payload if o.opcode == "constant" else None) for o in instruction.operands]),
        tuple([id(a) for a in instruction.attributes.values() if a.name not in _COMMENTS]),
        *[id(region) for regions in instruction.called.values() for region in regions],
    )


def _counts(name: str, called: Mapping[str, object]) -> bool:
    """Whether the text of an attribute of this name counts; what it calls counts by what that computes."""
    return name not in _IRRELEVANT and name not in called


def _batching_attributes(call: Instruction) -> tuple[str | None, str | None]:
    """What a call declares of its batch and its dimensions (`rules.batched`): all that counts of its frontend
    attributes."""
    said = dict(call.get("frontend_attributes", {}))
    return said.get("num_batch_dims"), said.get("xla.sdy.sharding_rule")


def _region_signature(region: Computation) -> Hashable:
    """What a region computes, whatever its names: every instruction, literal, and who reads whom."""
    places = {instruction: place for place, instruction in enumerate(region)}
    wired = tuple((signature(i), i.index, i.payload, tuple(places[o] for o in i.operands)) for i in region)
    return wired, places[region.root]
