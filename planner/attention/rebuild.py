"""A module with some values replaced by new ones, and without what nobody reads then."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.rewrites import edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A module in a form that attention is recognised in.

    origins: of each new instruction that is gone where that served, by name, the name of what it stands for.
    """

    module: Module
    origins: Mapping[str, str]


#: Instructions that are more than their result.
_EFFECTS = frozenset({
    "parameter", "infeed", "outfeed", "send", "recv", "send-done", "recv-done", "after-all", "domain",
})  # fmt: skip


def rebuild(
    module: Module,
    replaced: Mapping[Instruction, Instruction],
    written: Mapping[Computation, Sequence[tuple[Instruction, Sequence[Instruction]]]],
    regions: Iterable[Computation] = (),
) -> Module:
    """`module` with readers of the keys of `replaced` reading their new values.

    written: new instructions of each computation, which read old ones, by the place of an old one.
    regions: that they call.
    """
    computations: dict[Computation, Computation] = {}
    for computation in module.computations:
        computations[computation] = _rebuild(computation, replaced, written.get(computation, ()), computations)
    return edit.module_of(module, [*regions, *computations.values()])


def _rebuild(
    computation: Computation,
    replaced: Mapping[Instruction, Instruction],
    written: Sequence[tuple[Instruction, Sequence[Instruction]]],
    computations: Mapping[Computation, Computation],
) -> Computation:
    copies: dict[Instruction, Instruction] = {}
    places: dict[Instruction, tuple[int, int]] = {}
    for place, old in enumerate(computation):
        called = {
            name: tuple(computations.get(callee, callee) for callee in callees) for name, callees in old.called.items()
        }
        copies[old] = edit.copy_of(old, old.operands, called=called)
        places[copies[old]] = (place, 0)
    for product, news in written:
        for number, new in enumerate(news):
            places[new] = (places[copies[product]][0], number + 1)

    def current(value: Instruction) -> Instruction:
        value = replaced.get(value, value)
        return copies.get(value, value)

    for instruction in places:
        instruction.operands = tuple(current(operand) for operand in instruction.operands)
    root = current(computation.root)
    order = _order(live_instructions(root, places), places)
    return edit.computation_of(computation, order, root)


def live_instructions(root: Instruction, instructions: Iterable[Instruction]) -> set[Instruction]:
    """What the root is computed from, and what is more than its result."""
    pending = [root, *(each for each in instructions if each.opcode in _EFFECTS or _has_effect(each))]
    live = set(pending)
    while pending:
        for operand in pending.pop().operands:
            if operand not in live:
                live.add(operand)
                pending.append(operand)
    return live


def _has_effect(instruction: Instruction) -> bool:
    return bool(instruction.get("custom_call_has_side_effect", False)) or "control-predecessors" in (
        instruction.attributes
    )


def _order(live: set[Instruction], places: Mapping[Instruction, tuple[int, int]]) -> list[Instruction]:
    """Operands before their readers, and otherwise as they stood."""
    readers: dict[Instruction, list[Instruction]] = {}
    missing: dict[Instruction, int] = {}
    for instruction in live:
        operands = set(instruction.operands)
        missing[instruction] = len(operands)
        for operand in operands:
            readers.setdefault(operand, []).append(instruction)
    ready = [(places[each], number, each) for number, each in enumerate(live) if not missing[each]]
    heapq.heapify(ready)
    order: list[Instruction] = []
    serial = len(live)
    while ready:
        _, _, instruction = heapq.heappop(ready)
        order.append(instruction)
        for reader in readers.get(instruction, ()):
            missing[reader] -= 1
            if not missing[reader]:
                serial += 1
                heapq.heappush(ready, (places[reader], serial, reader))
    return order
