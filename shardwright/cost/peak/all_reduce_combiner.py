"""Combined reductions, after XLA's AllReduceCombiner and ReduceScatterCombiner.

After CombineInstructionsByKey (xla/service/collective_combiner_utils.h). All-reduces are combinable with equal element
type, reduction and device groups; likewise reduce-scatters. In post-order, the first remaining one is combined with its
combinable successors, up to the first that depends on the group or exceeds the size limit; later ones stay, combinable
or not. Consequences: the groups depend on the order, and a combined reduction waits on the inputs of all its members. A
gradient may wait on an unrelated loop, and everything waiting is stored.
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

#: Combinable kinds of collectives, with the maximum bytes of their combined results.
Limits = Mapping[str, float]


def limits_of(profile: HardwareProfile) -> Limits:
    """Size limits in bytes of a profile's compiler, per kind of reduction."""
    if profile.compiler.runs("merges_all_reduces"):
        return {"all-reduce": math.inf}
    return {kind: most_bytes for kind, most_bytes in profile.combiner_limits if kind in _REDUCING}


def all_reduce_mark(instruction: Instruction, element_type: str, atoms: AtomOrder, node: int) -> tuple[object, ...]:
    """Mark of a node that reduces an instruction's result over devices; unique to the node.

    element_type: of the sent elements. atoms: parts of the mesh axes that differ within a group.
    """
    applied = instruction.called.get("to_apply")
    opcode = applied[0].root.opcode if applied else "add"
    return (_MARK, (opcode, element_type, frozenset(atoms)), node)


def combine_reductions(program: DeviceProgram, limits: Limits) -> list[tuple[int, ...]]:
    """Groups of combined reductions, of more than one node each."""
    keys = {
        node: (program.opcodes[node], *mark[1])
        for node, mark in program.marks.items()
        if _is_small(program, node, limits) and isinstance(mark, tuple) and mark[:1] == (_MARK,)
    }
    return _Combiner(program, keys, limits).run() if len(keys) > 1 else []


def _is_small(program: DeviceProgram, node: int, limits: Limits) -> bool:
    """Whether a reduction is within the limit; larger ones are never combined."""
    return sum(program.sizes_bytes[node]) <= limits.get(program.opcodes[node], -1)


class _Combiner:
    """Combines nodes of a program.

    keys: the key shared by combinable nodes, a node's opcode first.
    The graph contains those nodes alone, plus junctions: sets of several needed nodes.
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
        self.bits: dict[int, int] = {}  # of the members, by leader
        self.node_of: dict[int, int] = {}  # program node, by place in this graph
        self.root = self._build_graph(program)

    def run(self) -> list[tuple[int, ...]]:
        remaining = set(self.node_of)
        while remaining:
            order = self._post_order()
            done_before = self._find_dependencies(order)
            alike: dict[Hashable, list[int]] = {}
            for place in order:
                if place in remaining:
                    alike.setdefault(self.keys[self.node_of[place]], []).append(place)
            for place in order:
                if place not in remaining:
                    continue
                group = self._next_group(place, alike[self.keys[self.node_of[place]]], done_before, remaining)
                remaining.difference_update(group)
                if len(group) > 1:
                    self._combine(group)
                    break  # dependencies have changed
            else:
                break
        return [tuple(sorted(self.node_of[member] for member in group)) for group in self.members.values()]

    def _next_group(self, first: int, alike: list[int], done_before: Mapping[int, int], places: set[int]) -> list[int]:
        """The first of some remaining places, and its successors up to the first that depends on the group or is too
        large.
        """
        group, bits = [first], 1 << first
        room = self._limit(first) - self._size(first)
        for place in alike[alike.index(first) + 1 :]:
            if place in places:
                room -= self._size(place)
                if done_before[place] & bits or room < 0:
                    break
                group.append(place)
                bits |= 1 << place
        return group

    def _limit(self, place: int) -> float:
        return self.limits[self.keys[self.node_of[place]][0]]

    def _size(self, place: int) -> int:
        return self.size_bytes[self.node_of[place]]

    def _build_graph(self, program: DeviceProgram) -> int:
        """Fill the graph; returns the place of the program's root."""
        stands_for: list[int | None] = []
        junctions: dict[tuple[int, ...], int] = {}
        for node, operands in enumerate(program.operands):
            sources = (stands_for[operand] for operand in operands)
            needed = tuple(dict.fromkeys(source for source in sources if source is not None))
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
        assert root is not None  # programs have no dead nodes
        return root

    def _post_order(self) -> list[int]:
        """Places after their dependencies, first dependency first; combined ones are adjacent."""
        order: dict[int, None] = {}
        todo = [self.root]
        while todo:
            place = todo[-1]
            if place in order:
                todo.pop()
                continue
            together = self._group_of(place)
            missing = [needed for member in together for needed in self.needs[member] if needed not in order]
            if not missing:
                todo.pop()
                order.update(dict.fromkeys(together))
            else:
                todo += reversed(missing)
        return list(order)

    def _find_dependencies(self, order: Iterable[int]) -> dict[int, int]:
        """Per place, its transitive dependencies, in bits of one number; combined ones share their members'."""
        dependencies: dict[int, int] = {}
        for place in order:
            if place in dependencies:
                continue
            together, bits = self._group_of(place), 0
            needs = (needed for member in together for needed in self.needs[member])
            for needed in {self.leader.get(needed, needed) for needed in needs}:
                bits |= dependencies[needed] | self.bits.get(needed, 1 << needed)
            dependencies.update(dict.fromkeys(together, bits))
        return dependencies

    def _group_of(self, place: int) -> list[int]:
        return self.members.get(self.leader.get(place, place), [place])

    def _combine(self, places: list[int]) -> None:
        self.members[places[0]] = places
        self.bits[places[0]] = sum(1 << place for place in places)
        self.leader |= dict.fromkeys(places, places[0])
