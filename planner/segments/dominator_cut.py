"""Segments: the program is cut at the values that the forward pass narrows to.

A *critical node* dominates the forward graph: every path from the batch to the loss passes through it. The nodes of a
training step come in topological order; one sweep finds the critical ones: no edge jumps over them. Only values that
depend on both state (parameters) and batch count: values of the batch alone (labels, masks, positions) or of parameters
alone (a tied embedding) reach every layer and cut nothing.

A segment is the part between two critical nodes, if it has a choice (a product, a gather, a loop). Backward and
optimizer instructions belong to the segment of the forward instructions they differentiate: they read values saved by
that segment, or its parameters. Equal segments (transformer layers) are recognised by their computation, and solved
once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES, forward_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """of: per node its segment, -1 for cheap nodes.
    count: of segments.
    cuts: the critical nodes that end all segments but the last.
    """

    of: tuple[int, ...]
    count: int
    cuts: tuple[int, ...]


def find_segments(
    flow: Dataflow, free: Sequence[bool], state: frozenset[int], twins: Mapping[int, int] | None = None
) -> Segments:
    """Cut `flow` at its critical nodes.

    free: per node, whether it is recomputed for each reader.
    state: nodes of arguments that are parameters or optimizer state.
    twins: recomputed copy → the forward node it belongs with.
    """
    forward = forward_nodes(flow, free, state)
    cuts = _find_cuts(flow, forward)
    of = _assign_segments(flow, free, forward, cuts, twins or {})
    return Segments(of=tuple(of), count=len(cuts) + 1, cuts=tuple(cuts))


def _find_cuts(flow: Dataflow, forward: list[int]) -> list[int]:
    """Critical nodes that end a segment, in order."""
    members = set(forward)
    last_reader: dict[int, int] = {}
    for i in forward:
        for use in flow.nodes[i].uses:
            if use.source[0] in members:
                last_reader[use.source[0]] = max(last_reader.get(use.source[0], -1), i)
    cuts, reach, has_choice = [], -1, False
    for i in forward:
        node = flow.nodes[i]
        # No value from before i is read after it: what follows sees the forward pass so far through i alone.
        if i >= reach and has_choice and i in last_reader and len(node.shapes) == 1:
            cuts.append(i)
            has_choice = False
        reach = max(reach, last_reader.get(i, -1))
        has_choice = has_choice or node.instruction.opcode in CHOICE_OPCODES
    return cuts


def _assign_segments(
    flow: Dataflow, free: Sequence[bool], forward: list[int], cuts: list[int], twins: Mapping[int, int]
) -> list[int]:
    """Segment per node: forward nodes by the cuts, twins with their originals, all others by the earliest segment among
    their operands."""
    unknown = len(cuts) + 1
    of = [unknown] * len(flow.nodes)
    number = 0
    for i in forward:
        while number < len(cuts) and i > cuts[number]:
            number += 1
        of[i] = number
    is_forward = [False] * len(flow.nodes)
    for i in forward:
        is_forward[i] = True
    shared = _assign_inputs(flow, of, is_forward, unknown)
    arguments = set(flow.parameters)
    for node in flow.nodes:  # backward and optimizer: operands were saved or computed by their segment
        if of[node.index] < unknown or node.index in arguments:
            continue
        if node.index in twins and of[twins[node.index]] < unknown:
            of[node.index] = of[twins[node.index]]
            continue
        operand_segments = [
            of[use.source[0]] for use in node.uses if not free[use.source[0]] and not shared[use.source[0]]
        ]
        of[node.index] = min(operand_segments, default=unknown)
    is_settled = [forward or i in twins for i, forward in enumerate(is_forward)]
    _pull_updates(flow, of, free, is_settled, unknown)
    for index in flow.parameters:  # state not read in the forward pass: the segment of its update
        if of[index] == unknown:
            of[index] = min((of[use.source[0]] for use in flow.nodes[index].uses), default=unknown)
    for node in reversed(flow.nodes):
        for use in node.uses:
            source = use.source[0]
            if of[source] == unknown or (source in arguments and shared[source]):
                of[source] = min(of[source], of[node.index])
    return [-1 if free[i] else min(segment, len(cuts)) for i, segment in enumerate(of)]


def _pull_updates(flow: Dataflow, of: list[int], free: Sequence[bool], is_settled: list[bool], unknown: int) -> None:
    """Move update-only nodes into the earlier segment of the updated state, if their operands are read there anyway (in
    place). Example: a bias gradient is a sum over the gradient passed on by the next layer."""
    arguments = set(flow.parameters)
    leads = _segments_of_updates(flow, of, unknown)
    may_move = [
        node
        for i, node in enumerate(flow.nodes)
        if 0 <= leads[i] < of[i] and not (free[i] or is_settled[i] or i in arguments)
    ]
    read_in: dict[int, set[int]] = {use.source[0]: set() for node in may_move for use in node.uses}
    for node in flow.nodes:
        for use in node.uses:
            if use.source[0] in read_in:
                read_in[use.source[0]].add(of[node.index])
    for node in may_move:
        i, target = node.index, leads[node.index]
        operands = [use.source[0] for use in node.uses if not free[use.source[0]]]
        if all(of[j] <= target or of[j] == unknown or target in read_in[j] for j in operands):
            of[i] = target


def _segments_of_updates(flow: Dataflow, of: list[int], unknown: int) -> list[int]:
    """Per node the segment of the state it updates: -1 if unknown, -2 if several."""
    arguments = set(flow.parameters)
    leads = [-1] * len(flow.nodes)
    for index in flow.parameters:
        leads[index] = of[index] if of[index] != unknown else -1
    updated = [flow.nodes[index] for index in flow.parameters]
    for node in (*updated, *reversed(flow.nodes)):
        mine = leads[node.index]
        for use in node.uses:
            source = use.source[0]
            if source in arguments or mine == -1:
                continue
            leads[source] = mine if leads[source] in (-1, mine) else -2
    return leads


def _assign_inputs(flow: Dataflow, of: list[int], is_forward: list[bool], unknown: int) -> list[bool]:
    """Assign other inputs of forward instructions (parameters, their casts, masks) to the first segment that reads
    them, in place. Returns whether several segments do."""
    shared = [False] * len(flow.nodes)
    for node in reversed(flow.nodes):
        mine = of[node.index]
        if mine == unknown:
            continue
        for use in node.uses:
            source = use.source[0]
            if source >= node.index or is_forward[source]:
                continue
            shared[source] = shared[source] or shared[node.index] or of[source] not in (unknown, mine)
            of[source] = min(of[source], mine)
    return shared


# ---- equal segments -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInstance:
    """One segment as a list of variables: its nodes and their shared layouts in order, then the shared layouts read
    from other segments.

    kind: equal for segments with the same problem; their variables then correspond one by one.
    own_count: number of own variables.
    """

    kind: int
    nodes: tuple[int, ...]
    variables: tuple[tuple[int, int], ...]
    own_count: int  # how many of `variables` are its own

    @property
    def imports(self) -> tuple[tuple[int, int], ...]:
        return self.variables[self.own_count :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Segments first … first + period × repeats - 1: the same `period` segments, repeated `repeats` times."""

    first: int
    period: int
    repeats: int

    @property
    def stop(self) -> int:
        return self.first + self.period * self.repeats


def find_runs(instances: Sequence[SegmentInstance]) -> tuple[Run, ...]:
    """The longest repetitions in the sequence of kinds, from left to right, with at least three repeats."""
    kinds = [instance.kind for instance in instances]
    owner = {
        v: (s, i)
        for s, instance in enumerate(instances)
        for i, v in enumerate(instance.variables[: instance.own_count])
    }
    runs, start = [], 0
    while start < len(kinds):
        best: Run | None = None
        for period in range(1, (len(kinds) - start) // 3 + 1):
            repeats = 1
            while kinds[start + repeats * period : start + (repeats + 1) * period] == kinds[start : start + period]:
                repeats += 1
            run = Run(first=start, period=period, repeats=repeats)
            longer = best is None or period * repeats > best.period * best.repeats
            if repeats >= 3 and longer and _has_equal_repeats(instances, owner, run):
                best = run
        if best is None:
            start += 1
        else:
            runs.append(best)
            start = best.stop
    return tuple(runs)


def _has_equal_repeats(
    instances: Sequence[SegmentInstance], owner: Mapping[tuple[int, int], tuple[int, int]], run: Run
) -> bool:
    """Whether each import of every repeat comes from the same relative place, or from one place outside."""
    for offset in range(run.period):
        outside: set[tuple[int, tuple[int, int]]] = set()
        inside: set[tuple[int, int, int]] = set()
        for segment in range(run.first + offset, run.stop, run.period):
            for i, variable in enumerate(instances[segment].imports):
                maker, index = owner[variable]
                if run.first <= maker < run.stop:
                    inside.add((i, maker - segment, index))
                else:
                    outside.add((i, variable))
        if len({i for i, *_ in inside}) != len(inside) or len({i for i, _ in outside}) != len(outside):
            return False
    return True


def build_instances(
    flow: Dataflow,
    segments: Segments,
    variables: Callable[[Sequence[int]], tuple[list[tuple[int, int]], int]],
    describe: Callable[[tuple[int, int]], Hashable],
) -> tuple[SegmentInstance, ...]:
    """Every segment with its variables; equal segments have equal kinds.

    variables: (nodes) → their variables, and the number of own ones.
    describe: (variable) → key of its states and costs, operands' places aside.
    """
    members: list[list[int]] = [[] for _ in range(segments.count)]
    for index, segment in enumerate(segments.of):
        if segment >= 0:
            members[segment].append(index)
    kinds: dict[Hashable, int] = {}
    instances = []
    for nodes in members:
        listed, own = variables(nodes)
        key = _structural_key(flow, listed, own, describe)
        kind = kinds.setdefault(key, len(kinds))
        instances.append(SegmentInstance(kind=kind, nodes=tuple(nodes), variables=tuple(listed), own_count=own))
    return tuple(instances)


def match_isomorphic_variables(instances: Sequence[SegmentInstance]) -> dict[tuple[int, int], tuple[int, int]]:
    """Variable of a repeated segment → the corresponding variable of the first equal segment; both have the same
    states."""
    first: dict[int, SegmentInstance] = {}
    matches: dict[tuple[int, int], tuple[int, int]] = {}
    for instance in instances:
        model = first.setdefault(instance.kind, instance)
        if model is not instance:
            matches.update(
                zip(instance.variables[: instance.own_count], model.variables[: model.own_count], strict=True)
            )
    return matches


def _structural_key(
    flow: Dataflow, variables: Sequence[tuple[int, int]], own: int, describe: Callable[[tuple[int, int]], Hashable]
) -> Hashable:
    position = {variable: i for i, variable in enumerate(variables)}
    parts: list[Hashable] = [own]
    for variable in variables[:own]:
        node, leaf = variable
        parts.append(describe(variable))
        if leaf < 0:
            for use in flow.nodes[node].uses:
                source = position.get(use.source)
                if source is None:
                    source = position.get((use.source[0], -1), -1)
                parts.append((source, use.source[1], use.position, use.weight, use.hard))
        else:
            parts.append((position[node, -1], leaf))
    parts += [describe(variable) for variable in variables[own:]]
    return tuple(parts)
