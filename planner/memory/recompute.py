"""Rematerialization: the forward values to recompute in the backward pass, at a price per byte.

The backward pass needs some values of each segment. Each value is either kept, at its bytes, or recomputed, at its
seconds; its operands must then be available too, kept or recomputed. At a price p per byte, the minimum of seconds + p
× bytes is a minimum cut with two nodes per value, `A` (available in the backward pass) and `R` (recomputed):

    A of values read by the backward pass is on the source's side;
    A → R costs p × bytes: available and not recomputed means kept;
    R → sink costs the seconds of recomputing it;
    R → A of every operand costs infinity.

It follows Jain et al., "Checkmate" (2020), and functorch's min-cut partitioner, with seconds and bytes of one device
under a plan. Each kind of segment is cut by itself: critical nodes and all values read by other segments are kept, and
segments are recomputed one by one. The last segment is never recomputed: the backward pass begins with it. A ladder of
prices covers all useful choices, from selective recomputation (softmax, layer norm, GELU) to keeping only the
boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.cost.peak.memory import shard_bytes
from shardwright.hlo import Instruction, Module
from shardwright.planner.graph.dataflow import CONTROL_FLOW
from shardwright.planner.memory.tuning import BYTE_PRICES, FLOW_UNITS, MIN_SAVING
from shardwright.planner.plans.assemble import Decisions, segment_name
from shardwright.planner.plans.collectives import list_collectives
from shardwright.planner.rewrites.remat import Rematerialized, available_values, forward_pass, rematerialize, runs_once
from shardwright.planner.rewrites.remat_loops import LoopPair, loop_pairs, rematerialize_loops
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.strategies.expansion import local_results
from shardwright.plans.plan import RecomputedSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """One choice of values to recompute, with its seconds a step and its bytes saved.

    instructions: the recomputed instructions.
    segments: the recomputed segments.
    stages: forward instruction → its segment, or the next segment for the segment's last value.
    """

    instructions: frozenset[str]
    segments: tuple[RecomputedSegment, ...]
    stages: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return sum(segment.time_s for segment in self.segments)

    @property
    def saved_bytes(self) -> int:
        return sum(segment.saved_bytes for segment in self.segments)


def list_recomputations(
    decisions: Decisions, chain: Chain, step_s: float, peak_bytes: int, prices: Sequence[float] = BYTE_PRICES
) -> list[Recomputation]:
    """The useful choices for a plan, with increasing saved bytes and increasing seconds.

    step_s, peak_bytes: of the plan.
    prices: per byte, in units of step_s / peak_bytes.

    Empty when nothing can be recomputed.
    """
    stages = _stage_numbers(decisions)
    kinds = [*_segment_kinds(decisions, chain), *_loop_kinds(decisions)]
    cuts: list[_Cuts] = [((),) * len(kinds)]
    for price in prices:
        cut = tuple(tuple(kind.cut(price * step_s / peak_bytes)) for kind in kinds)
        if cut != cuts[-1]:
            cuts += [_intermediate_cut(kinds, cuts[-1], cut), cut]
    ladder: list[Recomputation] = []
    for cut in cuts:
        choice = Recomputation(
            instructions=frozenset(
                name for kind, values in zip(kinds, cut, strict=True) for name in kind.names(values)
            ),
            segments=tuple(kind.segment(values) for kind, values in zip(kinds, cut, strict=True) if values),
            stages=stages,
        )
        if choice.saved_bytes > (1 + MIN_SAVING) * (ladder[-1].saved_bytes if ladder else 0):
            ladder.append(choice)
    return ladder


#: Per kind of segment, the positions of its recomputed values.
_Cuts = tuple[tuple[int, ...], ...]


def _intermediate_cut(kinds: Sequence[_SegmentKind], before: _Cuts, after: _Cuts) -> _Cuts:
    """`before` with some kinds changed to `after`, in order of seconds per saved byte, until half of the total saving
    is reached."""
    gains = []
    for i, (kind, old, new) in enumerate(zip(kinds, before, after, strict=True)):
        if old != new:
            was, will = kind.segment(old), kind.segment(new)
            gains.append((will.time_s - was.time_s, will.saved_bytes - was.saved_bytes, i))
    gains.sort(key=lambda gain: gain[0] / max(gain[1], 1))
    goal, saved, mixed = sum(gain[1] for gain in gains) / 2, 0, list(before)
    for _, gained, i in gains:
        if saved >= goal:
            break
        saved += gained
        mixed[i] = after[i]
    return tuple(mixed)


def apply_recomputation(module: Module, choice: Recomputation) -> Rematerialized:
    """The program with a choice's values recomputed. Instructions added by a view are left to the code for views."""
    forward = frozenset(forward_pass(module))
    recomputed = choice.instructions & forward
    rematerialized = rematerialize(module, keep=forward - recomputed, recompute=recomputed, stages=choice.stages)
    looped, twins = rematerialize_loops(rematerialized.module, choice.instructions - forward)
    return Rematerialized(module=looped, twins={**rematerialized.twins, **twins})


@dataclass(slots=True, kw_only=True, eq=False)
class _Value:
    """A forward instruction, with the costs of keeping and of recomputing it.

    seconds: of recomputing; None if forbidden.
    """

    instruction: Instruction
    size_bytes: int
    seconds: float | None
    operands: list[int] = field(default_factory=list)  # values of the same segment
    is_needed_backward: bool = False  # by the backward pass


@dataclass(slots=True, kw_only=True, eq=False)
class _SegmentKind:
    """Equal segments.

    values: of the first segment.
    repeats: the instructions' names, per segment.
    """

    name: str
    values: list[_Value]
    repeats: list[list[str]]

    def names(self, values: Sequence[int]) -> Iterator[str]:
        for repeat in self.repeats:
            yield from (repeat[i] for i in values)

    def segment(self, values: Sequence[int]) -> RecomputedSegment:
        times = len(self.repeats)
        return RecomputedSegment(
            name=self.name,
            repeats=times,
            values=len(values),
            time_s=times * sum(self.values[i].seconds or 0.0 for i in values),
            saved_bytes=times * (self._backward_bytes(set()) - self._backward_bytes(set(values))),
        )

    def _backward_bytes(self, recomputed: set[int]) -> int:
        """Bytes kept for the backward pass, without recomputed values."""
        there = {i for i, value in enumerate(self.values) if value.is_needed_backward}
        there |= {operand for i in recomputed for operand in self.values[i].operands}
        return sum(self.values[i].size_bytes for i in there - recomputed)

    def cut(self, price: float) -> list[int]:
        """The values to recompute at `price` seconds per byte."""
        import networkx  # see `rematerialize`

        graph: Any = networkx.DiGraph()
        graph.add_nodes_from(("source", "sink"))
        for i, value in enumerate(self.values):
            if value.is_needed_backward:
                graph.add_edge("source", ("A", i))
            graph.add_edge(("A", i), ("R", i), capacity=round(price * value.size_bytes * FLOW_UNITS))
            if value.seconds is None:
                graph.add_edge(("R", i), "sink")  # without a capacity: never cut, so never recomputed
            else:
                graph.add_edge(("R", i), "sink", capacity=round(value.seconds * FLOW_UNITS))
            for operand in value.operands:
                graph.add_edge(("R", i), ("A", operand))
        _, (there, _) = networkx.minimum_cut(graph, "source", "sink")
        return [i for i in range(len(self.values)) if ("R", i) in there]


def _stage_numbers(decisions: Decisions) -> dict[str, int]:
    flow, segments = decisions.graph.flow, decisions.graph.variables.segments
    ends = set(segments.cuts)
    forward = set(forward_pass(flow.module))
    stages = {}
    for instruction in flow.module.entry:
        if instruction.name in forward and flow.leaves[instruction]:
            node = flow.leaves[instruction][0][0]
            if segments.of[node] >= 0:
                stages[instruction.name] = segments.of[node] + (node in ends)
    return stages


def _segment_kinds(decisions: Decisions, chain: Chain) -> list[_SegmentKind]:
    """The forward pass by kinds of segments."""
    flow = decisions.graph.flow
    forward = dict.fromkeys(forward_pass(flow.module))
    segment_of: dict[str, int] = {}
    by_name: dict[str, Instruction] = {}
    for instruction in flow.module.entry:
        if instruction.name in forward:
            by_name[instruction.name] = instruction
            (node, _), *_ = flow.leaves[instruction] or ((-1, 0),)  # a token has none
            segment_of[instruction.name] = decisions.graph.variables.segments.of[node] if node >= 0 else -1
    members: list[list[str]] = [[] for _ in chain.instances]
    for name, segment in segment_of.items():
        if segment >= 0:
            members[segment].append(name)
    kinds: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for segment, names in enumerate(members[:-1]):
        if names:
            what = tuple(by_name[name].opcode for name in names)
            kinds.setdefault((chain.instances[segment].kind, what), []).append(segment)
    costs = _Costs(decisions, by_name, segment_of)
    return [
        _SegmentKind(
            name=segment_name(decisions, segments[0]),
            values=costs.values(members[segments[0]]),
            repeats=[members[segment] for segment in segments],
        )
        for segments in kinds.values()
    ]


def _loop_kinds(decisions: Decisions) -> list[_SegmentKind]:
    """The values stacked by loops for their backward loops, with their operands."""
    flow, segments = decisions.graph.flow, decisions.graph.variables.segments
    pairs = loop_pairs(flow.module)
    if not pairs:
        return []
    costs = _Costs(decisions, {}, {})
    kinds = []
    for pair in pairs:
        # No value without a leaf: tokens, and the empty tuples of conditionals' branches.
        computed = (i for i in pair.body if i is not pair.body.root and i.opcode != "parameter" and flow.leaves[i])
        body = [i for i in computed if not pair.is_at_hand(i)]
        name = segment_name(decisions, max(segments.of[flow.leaves[pair.forward.loop][0][0]], 0))
        values = costs.rows(body, pair)
        kinds.append(_SegmentKind(name=f"{name}, in its loop", values=values, repeats=[[i.name for i in body]]))
    return kinds


class _Costs:
    """Bytes and seconds of forward instructions under a plan, and their readers."""

    def __init__(self, decisions: Decisions, forward: Mapping[str, Instruction], segment_of: Mapping[str, int]) -> None:
        self._decisions = decisions
        self._forward = forward
        self._segment_of = segment_of
        self._communication_s: dict[str, float] = {}
        for collective in list_collectives(decisions):
            seconds = self._communication_s.get(collective.instruction, 0.0)
            self._communication_s[collective.instruction] = seconds + collective.time_s
        entry = decisions.graph.flow.module.entry
        fixed = available_values(decisions.graph.flow.module)
        self._backward_inputs: set[str] = set()
        self._shared_values: set[str] = set()  # read by other segments' forward pass, or returned
        for user in entry:
            for operand in user.operands:
                if operand.name not in forward:
                    continue
                if user is entry.root:
                    self._shared_values.add(operand.name)
                elif user.name not in forward and user not in fixed:
                    self._backward_inputs.add(operand.name)
                elif segment_of[user.name] != segment_of[operand.name]:
                    self._shared_values.add(operand.name)

    def values(self, names: Sequence[str]) -> list[_Value]:
        position = {name: i for i, name in enumerate(names)}
        return [
            _Value(
                instruction=self._forward[name],
                size_bytes=self._bytes(self._forward[name]),
                seconds=self._seconds(self._forward[name]),
                operands=[position[o.name] for o in self._forward[name].operands if o.name in position],
                is_needed_backward=name in self._backward_inputs,
            )
            for name in names
        ]

    def rows(self, body: Sequence[Instruction], pair: LoopPair) -> list[_Value]:
        """The body of a forward loop: one value per trip, kept in a stack."""
        position = {instruction: i for i, instruction in enumerate(body)}
        saved = {row.value for row in pair.saved}
        return [
            _Value(
                instruction=instruction,
                size_bytes=pair.forward.rows * self._bytes(instruction),
                seconds=None if pair.element(instruction) is not None else self._seconds(instruction),
                operands=[position[o] for o in instruction.operands if o in position],
                is_needed_backward=instruction in saved,
            )
            for instruction in body
        ]

    def _bytes(self, instruction: Instruction) -> int:
        mesh, flow = self._decisions.graph.prices.mesh, self._decisions.graph.flow
        return sum(
            shard_bytes(shape.element_type, shape.dimensions, self._decisions.result(leaf), mesh)
            for shape, leaf in zip(instruction.shape.leaves, flow.leaves[instruction], strict=True)
            if not shape.is_on_host
        )

    def _seconds(self, instruction: Instruction) -> float | None:
        """Seconds of recomputing; None when it runs once or is available anyway."""
        name, opcode = instruction.name, instruction.opcode
        if name in self._shared_values or opcode in CONTROL_FLOW or opcode == "parameter" or runs_once(instruction):
            return None
        if opcode == "get-tuple-element" and instruction.operands[0].opcode in CONTROL_FLOW:
            return None  # stored by the loop
        decisions = self._decisions
        graph = decisions.graph
        if instruction in graph.builder.rules.inside.places:
            return None  # a part of a manual region would run again beside the rest
        (index, _), *_ = decisions.graph.flow.leaves[instruction]
        node = graph.flow.nodes[index]
        if node.is_value or node.instruction is not instruction:
            return 0.0
        strategy = decisions.strategies[index]
        ends = graph.variables.ends_kernel(index)
        local = local_results(strategy)
        traffic = graph.variables.kernels.traffic[index]
        compute_s = graph.prices.compute_s(instruction, strategy.operands, local, ends_kernel=ends, traffic=traffic)
        return node.weight * graph.variables.kernels.parts[index] * compute_s + self._communication_s.get(name, 0.0)
