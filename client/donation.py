"""Arguments that a step takes over: each is passed once, and its memory is the result's that updates it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from shardwright.client.arrays import RemoteArray
from shardwright.client.programs import StepProgram
from shardwright.errors import ArrayError


def require_donated_once(program: StepProgram, leaves: Sequence[Any]) -> None:
    """Raises ArrayError where a donated handle stands among the arguments twice."""
    if not program.donated:
        return
    handles = [id(leaf) for leaf in leaves if isinstance(leaf, RemoteArray)]
    if len(set(handles)) == len(handles):
        return
    for number in program.donated:
        if handles.count(id(leaves[number])) > 1:
            name = program.lowered.argument_names[program.leaf_numbers[number]]
            is_captured = any(leaves[number] is handle for handle in program.lowered.captured.values())
            fault = f"is closed over by {program.name}" if is_captured else f"is passed to {program.name} twice"
            raise ArrayError(
                f"the donated array {name} {fault}",
                where=name,
                remedy="pass a copy in one of the places, or do not donate it",
            )


def donate(
    program: StepProgram, leaves: Sequence[Any], results: Sequence[RemoteArray | None]
) -> dict[int, weakref.ref[RemoteArray]]:
    """Marks donated handles deleted, and the results in their place owners of the layout.

    Returns those results, by flat number of the argument that each updates.
    """
    aliases = program.lowered.aliases
    reused = set(aliases.values())
    for number in program.donated:
        leaf = leaves[number]
        if isinstance(leaf, RemoteArray):
            leaf._donate(program.name, is_reused=program.leaf_numbers[number] in reused)
    updated: dict[int, weakref.ref[RemoteArray]] = {}
    for output, argument in aliases.items():
        result = results[output]
        if result is not None:
            result._is_owned = True
            updated[argument] = weakref.ref(result)
    return updated
