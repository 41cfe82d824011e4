"""Which reductions run as one, as XLA's AllReduceCombiner and ReduceScatterCombiner make them.

After CombineInstructionsByKey (xla/service/collective_combiner_utils.h). All-reduces are alike where they reduce one
element type in one way over the same groups of devices; so are reduce-scatters. In post-order, the first that is left
is combined with those like it that follow, up to the first that needs one of them, or with which their results would
be more than a limit: what comes behind that is left for later, though it may not. So which run as one hangs on the
order, and a combined reduction waits for whatever any of them does: a gradient may wait for a loop that has nothing to
do with it, and all that waits with it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping

from shardwright.cost.moves.tilings import AtomOrder
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.profiles import HardwareProfile
from shardwright.hlo import Instruction

_MARK = "reduces"

_REDUCING = frozenset({"all-reduce", "reduce-scatter"})

#: Kinds of collectives that may be combined, and the most bytes of the results of those that run as one.
Limits = Mapping[str, float]


def limits_of(profile: HardwareProfile) -> Limits:
    """What a profile's compiler combines of all that reduces."""
    if profile.compiler.merges_all_reduces:
        return {"all-reduce": math.inf}
    return {kind: most_bytes for kind, most_bytes in profile.combiner_limits if kind in _REDUCING}


def all_reduce_mark(instruction: Instruction, element_type: str, atoms: AtomOrder, node: int) -> tuple[object, ...]:
    """The mark of a node that reduces what devices have of an instruction's result: no other node is equal to it.

    element_type: as it is sent. atoms: what of the mesh axes the devices of one group differ in.
    """
    applied = instruction.called.get("to_apply")
    opcode = applied[0].root.opcode if applied else "add"
    return (_MARK, (opcode, element_type, frozenset(atoms)), node)


def combine_reductions(program: DeviceProgram, limits: Limits) -> list[tuple[int, ...]]:
    """Groups of reductions that run as one, of more than one node each."""
    keys = {
        node: (program.opcodes[node], *mark[1])
        for node, mark in program.marks.items()
        if _is_small(program, node, limits) and isinstance(mark, tuple) and mark[:1] == (_MARK,)
    }
    return _Combiner(program, keys, limits).run() if len(keys) > 1 else []


def _is_small(program: DeviceProgram, node: int, limits: Limits) -> bool:
    """Whether a reduction may be combined: what is larger than the limit is left out."""
    return sum(program.sizes_bytes[node]) <= limits.get(program.opcodes[node], -1)


class _Combiner:
    """Combines nodes of a program.

    keys: what is equal for nodes that may be combined, a node's opcode first.
    The program is seen as a graph of those nodes alone, and of junctions, which need several of them.
    """

    def __init__(
        self, program: DeviceProgram, keys: Mapping[int, tuple[str, *tuple[Hashable, ...]]], limits: Limits
    ) -> None:
        self.keys = keys
        self.limits = limits
        self.size_bytes = {node: sum(program.sizes_bytes[node]) for node in keys}
        self.needs: list[tuple[int, ...]] = []
        self.leader: dict[int, int] = {}
        self.members: dict[int, list[int]] = {}
        self.node_of: dict[int, int] = {}  # of a program, by places of this graph
        self.root = self._build_graph(program)

    def run(self) -> list[tuple[int, ...]]:
        left = set(self.node_of)
        while left:
            order = self._post_order()
            done_before = self._find_dependencies(order)
            alike: dict[Hashable, list[int]] = {}
            for place in order:
                if place in left:
                    alike.setdefault(self.keys[self.node_of[place]], []).append(place)
            for place in order:
                if place not in left:
                    continue
                found = self._next_group(place, alike[self.keys[self.node_of[place]]], done_before, left)
                left.difference_update(found)
                if len(found) > 1:
                    self._combine(found)
                    break  # what needs what is another now
            else:
                break
        return [tuple(sorted(self.node_of[each] for each in found)) for found in self.members.values()]

    def _next_group(self, first: int, alike: list[int], done_before: Mapping[int, int], left: set[int]) -> list[int]:
        """The first of some places that are left, and those behind it up to one that needs any or is too large."""
        found, bits = [first], 1 << first
        room = self._limit(first) - self._size(first)
        for place in alike[alike.index(first) + 1 :]:
            if place in left:
                room -= self._size(place)
                if done_before[place] & bits or room < 0:
                    break
                found.append(place)
                bits |= 1 << place
        return found

    def _limit(self, place: int) -> float:
        return self.limits[self.keys[self.node_of[place]][0]]

    def _size(self, place: int) -> int:
        return self.size_bytes[self.node_of[place]]

    def _build_graph(self, program: DeviceProgram) -> int:
        """Fill the graph; returns the place of what the program's root needs."""
        stands_for: list[int | None] = []
        junctions: dict[tuple[int, ...], int] = {}
        for node, operands in enumerate(program.operands):
            read = (stands_for[operand] for operand in operands)
            needed = tuple(dict.fromkeys(each for each in read if each is not None))
            if node in self.keys:
                self.node_of[len(self.needs)] = node
                stands_for.append(len(self.needs))
                self.needs.append(needed)
            elif len(needed) > 1:
                if needed not in junctions:
                    junctions[needed] = len(self.needs)
                    self.needs.append(needed)
                stands_for.append(junctions[needed])
            else:
                stands_for.append(needed[0] if needed else None)
        root = stands_for[program.root]
        assert root is not None  # what nothing needs is not in a program
        return root

    def _post_order(self) -> list[int]:
        """Places, each behind those that it needs, the first of them first; combined ones stand together."""
        order: dict[int, None] = {}
        todo = [self.root]
        while todo:
            place = todo[-1]
            together = self._group_of(place)
            missing = [each for member in together for each in self.needs[member] if each not in order]
            if place in order or not missing:
                todo.pop()
                order.update(dict.fromkeys(together))
            else:
                todo += reversed(missing)
        return list(order)

    def _find_dependencies(self, order: Iterable[int]) -> dict[int, int]:
        """Per place, all that it needs, as bits of one number; combined ones need what any of them does."""
        found: dict[int, int] = {}
        for place in order:
            if place in found:
                continue
            together, bits = self._group_of(place), 0
            for each in (each for member in together for each in self.needs[member]):
                bits |= found[each] | sum(1 << other for other in self._group_of(each))
            found.update(dict.fromkeys(together, bits))
        return found

    def _group_of(self, place: int) -> list[int]:
        return self.members.get(self.leader.get(place, place), [place])

    def _combine(self, places: list[int]) -> None:
        self.members[places[0]] = places
        self.leader |= dict.fromkeys(places, places[0])
