"""The dataflow of a module: nodes over array leaves, with their producers and consumers.

A node is one sharding decision: a computing instruction, or a bare value. Values are arguments, outputs, loop-carried
values, parameters of called computations, results of conditionals, annotated arrays, and results of optimization
barriers (XLA does not see that input and output are equal). Tuples, their elements, loops and calls are no nodes: their
leaves resolve to the producing node.

A computation shared by several call sites is planned once (`inlining` leaves few such). Its nodes' weights are the
total executions over all sites: trip counts of loops multiply (`trip_counts`), branches of a conditional are equally
likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, Shape, TupleShape
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.trip_counts import TripCounter
from shardwright.planner.tuning import UNKNOWN_TRIPS
from shardwright.reserved_names import IDENTITY_TARGETS

#: (node number, array leaf of its result).
Leaf = tuple[int, int]

#: Instructions whose result leaves are operand leaves, in order.
_TRANSPARENT = frozenset({"tuple", "domain", "add-dependency"})

#: Instructions that forward values under other names: a reshard may come before or after one.
BARRIERS = frozenset({"optimization-barrier", "opt-barrier"})

#: Attributes through which control flow names the computations it runs.
CONTROL_FLOW = {
    "while": ("condition", "body"),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}

#: Opcodes resolved to their operands' leaves; they become no nodes.
_FOLLOWED = frozenset({"get-tuple-element", *_TRANSPARENT, *BARRIERS, *CONTROL_FLOW})


class Rate(NamedTuple):
    """Executions per step.

    weight: expected executions, the factor on costs: a loop of unknown length runs `UNKNOWN_TRIPS` times, each of n
        branches 1/n times.
    runs: executions visible in the partitioned program: a loop of unknown length and every branch count once.
    """

    weight: float
    runs: int

    def __add__(self, other: object) -> Rate:
        assert isinstance(other, Rate)
        return Rate(self.weight + other.weight, self.runs + other.runs)

    def __mul__(self, other: object) -> Rate:
        assert isinstance(other, Rate)
        return Rate(self.weight * other.weight, self.runs * other.runs)


_ONCE = Rate(1.0, 1)
_NEVER = Rate(0.0, 0)


class Use(NamedTuple):
    """An array flowing into operand leaf `position` of a node, `weight` times a step.

    hard: the two shardings must be equal (no reshard is possible between them).
    weight, runs: see `Rate`.
    """

    source: Leaf
    position: int
    weight: float
    runs: int
    hard: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """One decision: `instruction` computed (`is_value` false), or leaf `leaf` of its result forwarded.

    shapes: array leaves of the result. weight, runs: see `Rate`.
    """

    index: int
    instruction: Instruction
    computation: str
    shapes: tuple[ArrayShape, ...]
    weight: float
    runs: int
    is_value: bool = False
    leaf: int = 0
    uses: list[Use] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Dataflow:
    """The nodes of a module in topological order (a loop's carried values come before its body).

    leaves: per instruction, the nodes producing its result leaves.
    parameters / outputs: node per flat array leaf of the entry's parameters / result; an output aliased with a
        parameter is that parameter's node.
    entering: per control-flow instruction, the values fed by its operands' leaves.
    leaving: per root of the entry, a loop body or a branch, the values fed by its leaves.
    aliases: output leaf → parameter leaf.
    computations: every planned computation, callers first.
    notes: messages to the user.
    """

    module: Module
    nodes: list[Node] = field(default_factory=list)
    leaves: dict[Instruction, tuple[Leaf, ...]] = field(default_factory=dict)
    parameters: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    entering: dict[Instruction, tuple[Leaf, ...]] = field(default_factory=dict)
    leaving: dict[Instruction, tuple[Leaf, ...]] = field(default_factory=dict)
    aliases: dict[int, int] = field(default_factory=dict)
    computations: list[Computation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def build_dataflow(module: Module, *, is_flat: bool = False) -> Dataflow:
    """Flatten `module`; notes name loops of unknown trip count.

    is_flat: loops, calls and conditionals stay one node each, computing all their results.
    """
    with gc_paused():
        return _Builder(module, _FOLLOWED.difference(CONTROL_FLOW) if is_flat else _FOLLOWED).build()


class _Builder:
    def __init__(self, module: Module, followed: frozenset[str]) -> None:
        self._flow = Dataflow(module=module)
        self._followed = followed
        self._offsets = _Offsets()
        self._rates: dict[Computation, Rate] = {}
        self._entered: dict[Computation, tuple[Leaf, ...]] = {}  # parameter leaves of a planned computation

    def build(self) -> Dataflow:
        flow, entry = self._flow, self._flow.module.entry
        self._rates = _rates(entry, flow.notes)
        for parameter in sorted(entry.parameters, key=lambda p: p.index):
            flow.leaves[parameter] = self._values(parameter, entry.name, _ONCE)
            flow.parameters += [node for node, _ in flow.leaves[parameter]]
        self._enter(entry)
        self._outputs(entry)
        return flow

    # ---- instructions ------------------------------------------------------
    def _enter(self, computation: Computation) -> None:
        self._flow.computations.append(computation)
        leaves, rate, name = self._flow.leaves, self._rates[computation], computation.name
        for instruction in computation.instructions:
            if instruction.opcode in self._followed:
                leaves[instruction] = self._follow(instruction, computation)
            elif instruction not in leaves:
                leaves[instruction] = self._compute(instruction, name, rate)

    def _compute(self, instruction: Instruction, computation: str, rate: Rate) -> tuple[Leaf, ...]:
        leaves, nodes = self._flow.leaves, self._flow.nodes
        weight, runs = rate
        flat = [leaf for operand in instruction.operands for leaf in leaves[operand]]
        uses = [Use(leaf, position, weight, runs) for position, leaf in enumerate(flat)]
        shapes, index = instruction.shape.leaves, len(nodes)
        annotated = instruction.opcode == "custom-call" and instruction.get("custom_call_target") in IDENTITY_TARGETS
        is_value = annotated and len(flat) == 1
        nodes.append(Node(index, instruction, computation, shapes, weight, runs, is_value, 0, uses))
        return ((index, 0),) if len(shapes) == 1 else tuple([(index, leaf) for leaf in range(len(shapes))])

    def _follow(self, instruction: Instruction, computation: Computation) -> tuple[Leaf, ...]:
        opcode, leaves = instruction.opcode, self._flow.leaves
        if opcode == "get-tuple-element":
            first = self._offsets.leaf(instruction.operands[0].shape, (instruction.index,))
            return leaves[instruction.operands[0]][first : first + len(instruction.shape.leaves)]
        if opcode in _TRANSPARENT:
            flat = [leaf for operand in instruction.operands for leaf in leaves[operand]]
            return tuple(flat[: len(instruction.shape.leaves)])
        rate = self._rates[computation]
        if opcode in BARRIERS:
            return self._follow_barrier(instruction, computation, rate)
        if opcode == "while":
            return self._while(instruction, rate)
        if opcode == "call":
            return self._call(instruction, rate)
        return self._conditional(instruction, computation, rate)

    def _follow_barrier(self, barrier: Instruction, computation: Computation, rate: Rate) -> tuple[Leaf, ...]:
        held = self._values(barrier, computation.name, rate)
        sources = [leaf for operand in barrier.operands for leaf in self._flow.leaves[operand]]
        for (node, _), source in zip(held, sources, strict=True):
            self._flow.nodes[node].uses.append(Use(source, 0, *rate))
        return held

    def _while(self, loop: Instruction, rate: Rate) -> tuple[Leaf, ...]:
        (body,), (condition,) = loop.called["body"], loop.called["condition"]
        carried = self._parameters(body, self._flow.leaves[loop.operands[0]], rate)
        self._tie(condition, carried)
        self._flow.entering[loop] = carried
        if body.root not in self._flow.leaving:
            self._enter(condition)
            self._enter(body)
            self._flow.leaving[body.root] = carried
            self._feed(body.root, carried, self._rates[body])
        return carried

    def _call(self, call: Instruction, rate: Rate) -> tuple[Leaf, ...]:
        (callee,) = call.called["to_apply"]
        flat = tuple([leaf for operand in call.operands for leaf in self._flow.leaves[operand]])
        first = callee not in self._entered
        self._flow.entering[call] = self._parameters(callee, flat, rate)
        if first:
            self._enter(callee)
        return self._flow.leaves[callee.root]

    def _conditional(self, choice: Instruction, computation: Computation, rate: Rate) -> tuple[Leaf, ...]:
        operands: tuple[Leaf, ...] = self._flow.leaves[choice.operands[0]]
        results = self._values(choice, computation.name, rate)
        branch_rate = rate * _one_branch(choice)
        for branch, operand in zip(_computations_run(choice), choice.operands[1:], strict=True):
            first = branch not in self._entered
            operands += self._parameters(branch, self._flow.leaves[operand], branch_rate)
            if first:
                self._enter(branch)
            self._flow.leaving[branch.root] = results
            self._feed(branch.root, results, branch_rate)
        self._flow.entering[choice] = operands
        return results

    def _parameters(self, callee: Computation, fed: tuple[Leaf, ...], rate: Rate) -> tuple[Leaf, ...]:
        """The leaves of a called computation's parameters, fed from one more call site."""
        if callee not in self._entered:
            own = [self._values(p, callee.name, _NEVER) for p in sorted(callee.parameters, key=lambda p: p.index)]
            self._tie(callee, tuple(leaf for leaves in own for leaf in leaves))
        for (node, _), source in zip(self._entered[callee], fed, strict=True):
            self._flow.nodes[node].uses.append(Use(source, 0, *rate))
        return self._entered[callee]

    def _tie(self, computation: Computation, parameters: tuple[Leaf, ...]) -> None:
        self._entered[computation] = parameters
        rest = parameters
        for parameter in sorted(computation.parameters, key=lambda p: p.index):
            count = len(parameter.shape.leaves)
            self._flow.leaves[parameter], rest = rest[:count], rest[count:]

    def _feed(self, root: Instruction, targets: tuple[Leaf, ...], rate: Rate) -> None:
        """Connect the leaves of a computation's root to `targets`; only a tuple can reshard on the way."""
        for source, (node, _) in zip(self._flow.leaves[root], targets, strict=True):
            if source[0] != node:
                self._flow.nodes[node].uses.append(Use(source, 0, *rate, hard=root.opcode != "tuple"))

    # ---- nodes -------------------------------------------------------------
    def _values(self, instruction: Instruction, computation: str, rate: Rate) -> tuple[Leaf, ...]:
        """A bare value per array leaf of `instruction`'s result."""
        return tuple(
            [
                (self._value(instruction, computation, shape, i, rate), 0)
                for i, shape in enumerate(instruction.shape.leaves)
            ]
        )

    def _value(self, instruction: Instruction, computation: str, shape: ArrayShape, leaf: int, rate: Rate) -> int:
        nodes = self._flow.nodes
        nodes.append(Node(len(nodes), instruction, computation, (shape,), *rate, is_value=True, leaf=leaf))
        return len(nodes) - 1

    def _outputs(self, entry: Computation) -> None:
        """One value per output leaf; an output aliased with an argument is that argument's value."""
        flow, root = self._flow, entry.root
        flow.aliases = _flat_aliases(flow.module, self._offsets)
        sources = flow.leaves[root]
        targets: list[Leaf] = []
        for i, shape in enumerate(root.shape.leaves):
            if i in flow.aliases:
                targets.append((flow.parameters[flow.aliases[i]], 0))
            else:
                targets.append((self._value(root, entry.name, shape, i, _ONCE), 0))
        for source, (node_index, _) in zip(sources, targets, strict=True):
            if source[0] != node_index:
                flow.nodes[node_index].uses.append(Use(source, 0, *_ONCE))
        flow.outputs = [node for node, _ in targets]
        flow.leaving[root] = tuple(targets)


# ---- executions of each computation ----------------------------------------


def _rates(entry: Computation, notes: list[str]) -> dict[Computation, Rate]:
    """Executions per step of each computation, over all call sites (computations form a DAG); appends to `notes`."""
    order = _callers_first(entry)
    sites: dict[Computation, list[Instruction]] = {computation: [] for computation in order}
    for computation in order:
        for instruction in computation.instructions:
            if instruction.opcode in CONTROL_FLOW:
                for callee in _computations_run(instruction):
                    sites[callee].append(instruction)
    counter = TripCounter(sites)
    rates = dict.fromkeys(order, _NEVER)
    rates[entry] = _ONCE
    for computation in order:
        for instruction in computation.instructions:
            if instruction.opcode in CONTROL_FLOW:
                rate = rates[computation] * _times(instruction, counter, notes)
                for callee in _computations_run(instruction):
                    rates[callee] += rate
    return rates


def _times(instruction: Instruction, counter: TripCounter, notes: list[str]) -> Rate:
    """Executions of the called computations per execution of a control-flow instruction."""
    if instruction.opcode == "while":
        trips = counter.trips(instruction)
        if trips is None:
            notes.append(f"{instruction.name}: trip count unknown, priced as {UNKNOWN_TRIPS} trips")
            return Rate(UNKNOWN_TRIPS, 1)
        if not trips.is_exact:
            notes.append(f"{instruction.name}: may end early, priced as its limit of {trips.count} trips")
            return Rate(trips.count, 1)
        return Rate(trips.count, trips.count)
    if instruction.opcode == "conditional":
        return _one_branch(instruction)
    return _ONCE


def _one_branch(choice: Instruction) -> Rate:
    return Rate(1.0 / len(_computations_run(choice)), 1)


def _computations_run(instruction: Instruction) -> list[Computation]:
    """The computations run by a control-flow instruction, in operand order."""
    return [callee for name in CONTROL_FLOW[instruction.opcode] for callee in instruction.called.get(name, ())]


class _Offsets:
    """Index of each tuple element's first array leaf."""

    def __init__(self) -> None:
        self._starts: dict[int, list[int]] = {}  # by identity: shapes are interned, and outlive the builder

    def leaf(self, shape: Shape, path: Sequence[int]) -> int:
        """The first leaf of the element at `path`."""
        first = 0
        for step in path:
            assert isinstance(shape, TupleShape)
            starts = self._starts.get(id(shape))
            if starts is None:
                starts = list(accumulate((len(element.leaves) for element in shape.elements), initial=0))
                self._starts[id(shape)] = starts
            first += starts[step]
            shape = shape.elements[step]
        return first


def _flat_aliases(module: Module, offsets: _Offsets) -> dict[int, int]:
    """Output leaf → parameter leaf, both counted flat over all arrays."""
    parameters = sorted(module.entry.parameters, key=lambda p: p.index)
    first = list(accumulate((len(parameter.shape.leaves) for parameter in parameters), initial=0))
    root = module.entry.root.shape
    return {
        offsets.leaf(root, alias.output_index): first[alias.parameter_number]
        + offsets.leaf(parameters[alias.parameter_number].shape, alias.parameter_index)
        for alias in module.aliases
    }


def _callers_first(entry: Computation) -> list[Computation]:
    """Computations reachable from `entry` through control flow, callers before callees."""
    done: dict[Computation, None] = {}
    stack: list[tuple[Computation, bool]] = [(entry, False)]
    while stack:
        computation, finished = stack.pop()
        if finished:
            done.setdefault(computation)
        elif computation not in done:
            stack.append((computation, True))
            stack += [(callee, False) for callee in _callees(computation)]
    return list(reversed(done))


def computations_of(loop: Instruction) -> frozenset[str]:
    """Names of all computations inside a loop (or any control flow), at any depth."""
    return frozenset(inner.name for callee in _computations_run(loop) for inner in _callers_first(callee))


def _callees(computation: Computation) -> list[Computation]:
    return [
        callee
        for instruction in computation
        if instruction.opcode in CONTROL_FLOW
        for callee in _computations_run(instruction)
    ]
