"""Assigns the backward pass, the variables and their update to parts: each follows the forward code it differentiates.

- Other inputs of the forward pass (parameters, masks) go with their first reader. Views and conversions of parameters
  alone are rematerialized per reader.
- A value recomputed from the forward pass (rematerialization) goes with its original.
- A backward instruction reads gradients from parts c, c', … and forward values. If it reads forward value x, it
  differentiates the producer or a reader of x: the last such part not after the gradients.
  If it reads forward values alone, some with a later reading part, it goes with the last part that reads it.
- Values of arguments and constants alone, used only in the backward pass, go with the last part that reads them.
- A gradient sum for a variable (a bias) goes to the variable's part if that part reads the gradient anyway.
- Updates go with the gradients they read, not with scalars of all gradients (a global norm).
- If recomputed values would cross to a later part, the parts between are joined into one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.hlo import Instruction
from shardwright.planner.graph.dataflow import BARRIERS, Dataflow
from shardwright.planner.graph.value_numbering import number_values

#: Moves and conversions of a parameter for its readers: cheap, rematerialized by each of them.
_CHEAP = frozenset({"convert", "reshape", "transpose", "copy", "bitcast", "broadcast", "slice", "reverse"})

_NOWHERE = -1


@dataclass(slots=True, kw_only=True, eq=False)
class BackwardPlacement:
    """One step to be placed.

    free: per node, whether it is rematerialized per reader.
    state: nodes of arguments without the batch.
    of_forward: part of each forward node.
    settled: parts of nodes known beforehand (loops of one group).
    once: nodes run once a step, in order.
    count: number of parts.
    """

    flow: Dataflow
    free: Sequence[bool]
    state: frozenset[int]
    of_forward: Mapping[int, int]
    settled: Mapping[int, int]
    once: Sequence[int]
    count: int
    _of: list[int] = field(default_factory=list)
    _cheap_views: set[int] = field(default_factory=set)
    _ahead: list[set[int]] = field(default_factory=list)
    _twin_of: dict[int, int] = field(default_factory=dict)

    def run(self) -> tuple[list[int], int]:
        """The part of every node (-1: rematerialized per reader), and the number of parts."""
        flow, unknown = self.flow, self.count
        self._of = [unknown] * len(flow.nodes)
        for i, part in {**self.settled, **self.of_forward}.items():
            self._of[i] = part
        self._cheap_views = self._views_of_parameters()
        self._ahead = self._readers_ahead()
        self._place_feeds()
        self._place_backward()
        self._place_seeds()
        self._place_barriers()
        self._pull_gradient_sums()
        self._place_updates()
        self._place_variables()
        return self._join_parts()

    @property
    def fed(self) -> frozenset[int]:
        """Nodes read by forward instructions, neither arguments nor rematerialized; valid after `run`."""
        arguments = set(self.flow.parameters)
        fed_nodes = (i for i, parts in enumerate(self._ahead) if parts and not self._is_anywhere(i))
        return frozenset(
            i for i in fed_nodes if i not in arguments and i not in self.of_forward and i not in self.settled
        )

    def _is_anywhere(self, i: int) -> bool:
        return self.free[i] or i in self._cheap_views

    # ---- inputs of the forward pass ---------------------------------------------
    def _views_of_parameters(self) -> set[int]:
        """Nodes of every micro-batch that only move or convert parameters."""
        parameter_views: set[int] = set()
        once = set(self.once)
        for node in self.flow.nodes:
            i = node.index
            if node.is_value or node.instruction.opcode not in _CHEAP or i in once:
                continue
            sources = [use.source[0] for use in node.uses]
            if sources and all(s in self.state or s in parameter_views for s in sources):
                parameter_views.add(i)
        return parameter_views

    def _readers_ahead(self) -> list[set[int]]:
        """Per node, the parts of its forward readers, also through rematerialized values."""
        ahead: list[set[int]] = [set() for _ in self.flow.nodes]
        feeds = {i for i in range(len(self.flow.nodes)) if self._is_anywhere(i)}
        for node in reversed(self.flow.nodes):
            i = node.index
            mine = {self.of_forward[i]} if i in self.of_forward else (ahead[i] if i in feeds else set())
            for use in node.uses:
                if use.source[0] < i:
                    ahead[use.source[0]] |= mine
        return ahead

    def _place_feeds(self) -> None:
        """Places inputs of forward instructions, and their own inputs, with the first reader."""
        settled, arguments = {*self.of_forward, *self.settled}, set(self.flow.parameters)
        for node in reversed(self.flow.nodes):
            i = node.index
            if i in settled or i in arguments or self._is_anywhere(i) or not self._ahead[i]:
                continue
            self._of[i] = min(self._ahead[i])
            for use in node.uses:
                if use.source[0] < i:
                    self._ahead[use.source[0]] |= {self._of[i]}

    # ---- the backward pass --------------------------------------------------------
    def _place_backward(self) -> None:
        flow, of, unknown = self.flow, self._of, self.count
        arguments, once = set(flow.parameters), set(self.once)
        twins = self._twin_of = _twins(flow, set(self.of_forward))
        placed = {i for i in range(len(flow.nodes)) if of[i] != unknown and i not in self.settled}
        forward = placed | set(self.of_forward)
        undecided: dict[int, set[int]] = {}  # node of saved values alone, in several parts → those values
        for node in flow.nodes:
            i = node.index
            if of[i] != unknown or i in arguments or i in once or self._is_anywhere(i) or self._is_barrier(i):
                continue
            if i in twins:
                of[i] = of[twins[i]]
                continue
            direct = [self._through(use.source[0]) for use in node.uses]
            if all(self._is_anywhere(s) or s in arguments or (of[s] == unknown and s not in undecided) for s in direct):
                continue  # of arguments alone: `_place_seeds` places it
            sources = {r for s in direct if not self.free[s] for r in undecided.get(s, {s})}
            gradients = [of[s] for s in sources if s not in forward and s not in arguments and not self._is_anywhere(s)]
            last = min((part for part in gradients if part != unknown), default=None)
            if last is None and any(of[s] < max(self._ahead[s], default=0) for s in sources & forward):
                undecided[i] = sources
                continue
            saved = [part for s in sources if (part := self._part_differentiated(s, forward, last)) is not None]
            if last is not None:
                of[i] = min([last, *saved])
            else:
                of[i] = max(saved, default=unknown)

    def _place_seeds(self) -> None:
        """Places backward values without placed inputs with the last part reading them."""
        of, unknown = self._of, self.count
        excluded = {*self.flow.parameters, *self.once}
        last = [-1] * len(of)
        for node in reversed(self.flow.nodes):
            i = node.index
            if i not in excluded and of[i] == unknown and last[i] >= 0 and not self._is_barrier(i):
                of[i] = last[i]
            if i in excluded or (of[i] == unknown and not self._is_anywhere(i)):
                continue
            reader = last[i] if self._is_anywhere(i) else of[i]
            for use in node.uses:
                last[use.source[0]] = max(last[use.source[0]], reader)

    def _part_differentiated(self, source: int, forward: set[int], last: int | None) -> int | None:
        """The part differentiated by a reader of this forward value or parameter."""
        parts = set(self._ahead[source])
        if source in forward:
            parts.add(self._of[source])
            if last is None:
                return self._of[source]
        allowed = [part for part in parts if last is None or part <= last]
        return max(allowed, default=min(parts, default=None))

    def _is_barrier(self, i: int) -> bool:
        node = self.flow.nodes[i]
        return node.is_value and node.instruction.opcode in BARRIERS

    def _through(self, i: int) -> int:
        """The operand of a barrier, or the node itself."""
        while self._is_barrier(i):
            i = self.flow.nodes[i].uses[0].source[0]
        return i

    def _place_barriers(self) -> None:
        """Places a barrier with the first of its readers."""
        of, first = self._of, dict[Instruction, int]()
        for node in reversed(self.flow.nodes):
            for use in node.uses:
                if self._is_barrier(source := use.source[0]) and of[node.index] != _NOWHERE:
                    held = self.flow.nodes[source].instruction
                    first[held] = min(first.get(held, self.count), of[node.index])
            if self._is_barrier(node.index):
                of[node.index] = first.get(node.instruction, self.count)
        for node in self.flow.nodes:
            if self._is_barrier(node.index):
                of[node.index] = first.get(node.instruction, self.count)

    def _pull_gradient_sums(self) -> None:
        """Moves gradient sums to the part of their variable, given it reads these gradients anyway."""
        flow, of, unknown = self.flow, self._of, self.count
        fixed = {*self.of_forward, *self.settled, *flow.parameters, *self.once}
        leads = self._parts_of_parameters()
        successors: list[set[int]] = [set() for _ in flow.nodes]
        for node in flow.nodes:
            for use in node.uses:
                successors[use.source[0]].add(of[node.index])
        for node in flow.nodes:
            i, target = node.index, leads[node.index]
            if i in fixed or self._is_anywhere(i) or not 0 <= target < of[i]:
                continue
            sources = [s for use in node.uses if not self._is_anywhere(s := use.source[0])]
            if all(of[s] <= target or of[s] == unknown or target in successors[s] for s in sources):
                of[i] = target

    def _parts_of_parameters(self) -> list[int]:
        """Per node the part of the parameter it updates: -1 for none known, -2 for several."""
        flow = self.flow
        arguments = set(flow.parameters)
        leads = [-1] * len(flow.nodes)
        for i in flow.parameters:
            leads[i] = min(self._ahead[i], default=-1)
        updated = [flow.nodes[i] for i in flow.parameters]
        for node in (*updated, *reversed(flow.nodes)):
            mine = leads[node.index]
            for use in node.uses:
                source = use.source[0]
                if source in arguments or mine == -1 or not flow.nodes[source].shapes[use.source[1]].rank:
                    continue
                leads[source] = mine if leads[source] in (-1, mine) else -2
        return leads

    # ---- once a step ---------------------------------------------------------------
    def _place_updates(self) -> None:
        flow, of, unknown = self.flow, self._of, self.count
        arguments = set(flow.parameters)
        common: set[int] = set()
        for i in self.once:
            node = flow.nodes[i]
            if self.free[i]:
                continue
            sources = [use.source[0] for use in node.uses]
            source_parts = {
                of[s] for s in sources if s not in common and s not in arguments and not self._is_anywhere(s)
            }
            source_parts |= {min(self._ahead[s]) for s in sources if s in arguments and self._ahead[s]}
            source_parts.discard(unknown)
            if all(shape.rank == 0 for shape in node.shapes) and (
                len(source_parts) > 1 or not common.isdisjoint(sources)
            ):
                common.add(i)
            of[i] = min(source_parts, default=unknown)
        for i in reversed(self.once):
            for use in flow.nodes[i].uses:
                if of[use.source[0]] == unknown:
                    of[use.source[0]] = of[i]

    def _place_variables(self) -> None:
        """Places arguments with their first reader; undetermined nodes go to the first part."""
        flow, of, unknown = self.flow, self._of, self.count
        for i in flow.parameters:
            if self._ahead[i]:
                of[i] = min(self._ahead[i])
        arguments = set(flow.parameters)
        for node in reversed(flow.nodes):
            for use in node.uses:
                source = use.source[0]
                if (
                    source in arguments
                    and node.index not in arguments
                    and not self._ahead[source]
                    and source < node.index
                ):
                    of[source] = min(of[source], of[node.index]) if not self._is_anywhere(node.index) else of[source]
        for i, part in enumerate(of):
            if self._is_anywhere(i):
                of[i] = _NOWHERE
            elif part == unknown:
                of[i] = 0

    # ---- inseparable parts -------------------------------------------------------------
    def _join_parts(self) -> tuple[list[int], int]:
        """Parts renumbered, those linked by a rematerialized value joined.

        Nodes reading a gradient of an earlier part move there.
        """
        of, behind = self._of, self._backward_sources()
        is_joined = [False] * self.count  # with the part before
        for i, sources in behind:
            for source in sources:
                if of[source] < of[i] and (source in self._twin_of or self._is_barrier(source)):
                    is_joined[of[source] + 1 : of[i] + 1] = [True] * (of[i] - of[source])
        number, numbers = -1, []
        for joined in is_joined:
            number += not joined
            numbers.append(number)
        new_parts = [numbers[part] if part >= 0 else part for part in of]
        for i, sources in behind:
            if i not in self.settled:
                new_parts[i] = min([new_parts[i], *(new_parts[source] for source in sources)])
        return new_parts, number + 1

    def _backward_sources(self) -> list[tuple[int, set[int]]]:
        """Placed backward nodes in order, with their sources among them (direct, or through rematerialized values)."""
        excluded = {*self.flow.parameters, *self.once, *self.of_forward}
        excluded.update(i for i, parts in enumerate(self._ahead) if parts and self._of[i] >= 0)
        through: dict[int, set[int]] = {}  # by node that is made anew
        placed = []
        for node in self.flow.nodes:
            if (i := node.index) in excluded:
                continue
            sources: set[int] = set()
            for use in node.uses:
                source = use.source[0]
                if source not in excluded and source < i:
                    sources |= through.get(source, {source})
            if self._of[i] < 0:
                through[i] = sources
            else:
                placed.append((i, sources))
        return placed


def _twins(flow: Dataflow, forward: Collection[int]) -> dict[int, int]:
    """Nodes outside the forward pass equal to one of its nodes → this forward node."""
    meaning, arguments = number_values(flow), set(flow.parameters)
    ahead = {meaning[i][:1]: i for i in sorted(forward, reverse=True)}
    return {
        node.index: ahead[meaning[node.index][:1]]
        for node in flow.nodes
        if not node.is_value
        and node.index not in arguments
        and node.index not in forward
        and meaning[node.index][:1] in ahead
    }
