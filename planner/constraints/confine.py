"""Confines each instruction's strategies to those a forced strategy allows.

A forced strategy gives every mesh axis a role. A batch axis splits the batch in every possible instruction: its
strategies are those splitting the batch over most of these axes. A non-batch axis never splits it. See
`shardwright.planner.constraints.forced` on the consequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.planner.costs.prices import IntArray
from shardwright.planner.graph.batch_dim_analysis import NodeDims
from shardwright.planner.graph.dataflow import Dataflow, Node
from shardwright.planner.strategies.expansion import Strategy, local_results
from shardwright.planner.strategies.strategy_set import StrategySet

#: Instructions that read or write a table at positions that arrive with the batch.
LOOKUPS = frozenset({"gather", "scatter", "dynamic-slice", "dynamic-update-slice"})

#: Dimensions of one colour: of each operand, and of each leaf of the result.
_TiedLeafDims = tuple[NodeDims, NodeDims]

#: Of the batch, of experts and of the sequence; None: not known.
_Colours = tuple[_TiedLeafDims | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Roles of mesh axes. An axis without a role is free except under `not_batch`.

    batch: split the batch wherever possible, nothing else.
    not_batch: never split the batch.
    across: those of `batch` that may instead split dimensions across the batch (experts of a mixture).
    sequence: split the sequence wherever possible, nothing else.
    not_sequence: never split the sequence.
    sharded_state: those of `batch` over which dimensions not along the batch may be split too, sums over the batch may
        be scattered, and state updates are computed on shards. Over the others all that is whole.
    scattered: those of `sharded_state` over which sums over the batch are scattered where they arise, in every
        iteration of a loop.
    idle: nothing is split over them.
    """

    batch: tuple[str, ...] = ()
    not_batch: tuple[str, ...] = ()
    across: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    not_sequence: tuple[str, ...] = ()
    sharded_state: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Confinement:
    """Narrows strategy sets to the roles; results are cached.

    roles: of the mesh axes.
    dims: per node, the dimensions of its result leaves along the batch.
    across: the same across the batch, of experts; None: none known.
    sequence: the same of the sequence.
    updates: nodes to be computed on shards when possible (`sharded_state`).
    whole: nodes to be computed whole on every device of `batch` axes, but for what runs along the batch.
    hard: nodes without a possible reshard before their consumers, and lookups where those are left out; they stay free.
    """

    roles: Roles
    dims: Sequence[NodeDims]
    across: Sequence[NodeDims] | None = None
    sequence: Sequence[NodeDims] | None = None
    updates: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    hard: frozenset[int] = frozenset()
    _known: dict[int, _Colours] = field(default_factory=dict)
    _narrowed: dict[tuple[int, _Colours, bool, bool], StrategySet] = field(default_factory=dict)
    _kept_alive: list[StrategySet] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        flow: Dataflow,
        roles: Roles,
        dims: Sequence[NodeDims],
        state_outputs: Sequence[int],
        *,
        across: Sequence[NodeDims] | None = None,
        sequence: Sequence[NodeDims] | None = None,
        split_state: frozenset[int] | None = None,
        free_opcodes: frozenset[str] = frozenset(),
    ) -> Confinement:
        """state_outputs: the nodes of updated state.

        split_state: nodes of the arguments that are split between steps: updates that read none of them are computed
            whole; None: all state is.
        free_opcodes: of the instructions that stay free.
        """
        hard = frozenset(use.source[0] for node in flow.nodes for use in node.uses if use.hard)
        free = frozenset(node.index for node in flow.nodes if node.instruction.opcode in free_opcodes)
        updates, whole = frozenset[int](), frozenset[int]()
        if roles.sharded_state:
            on_shards = [o for o in state_outputs if split_state is None or _reads(flow, dims, o, split_state)]
            updates = _updates(flow, dims, on_shards)
            whole = _updates(flow, dims, [output for output in state_outputs if output not in on_shards])
        return cls(
            roles=roles,
            dims=dims,
            across=across,
            sequence=sequence,
            updates=updates - whole,
            whole=whole - updates,
            hard=hard | free,
        )

    def key(self, node: Node) -> tuple[object, ...]:
        """All that `narrow` depends on, besides the strategies."""
        return (
            self._tied_dims(node),
            node.index in self.updates,
            node.index in self.whole,
            node.index in self.hard,
        )

    def narrow(self, node: Node, strategy_set: StrategySet) -> StrategySet:
        """The strategies of `strategy_set` that the roles allow `node`."""
        if node.index in self.hard:
            return strategy_set
        colours = self._tied_dims(node)
        key = (id(strategy_set), colours, node.index in self.updates, node.index in self.whole)
        if key not in self._narrowed:
            self._kept_alive.append(strategy_set)  # an id is valid only while its object lives
            self._narrowed[key] = _only(strategy_set, self._legal_strategies(strategy_set, colours, *key[2:]))
        return self._narrowed[key]

    def _tied_dims(self, node: Node) -> _Colours:
        """Dimensions of the node's operands and results along the batch, of experts, and of the sequence."""
        tied = self._known.get(node.index)
        if tied is None:
            sources = [use.source for use in node.uses][: 1 if node.is_value else None]
            tied = self._known[node.index] = tuple(
                [
                    None
                    if dims is None
                    else (tuple([dims[source][leaf] for source, leaf in sources]), dims[node.index])
                    for dims in (self.dims, self.across, self.sequence)
                ]
            )
        return tied

    def _legal_strategies(
        self, strategy_set: StrategySet, colours: _Colours, is_update: bool, is_whole: bool
    ) -> IntArray:
        roles, strategies = self.roles, strategy_set.strategies
        along, across, sequence = ([_along(strategy, colour) for strategy in strategies] for colour in colours)
        legal = [
            i
            for i, strategy in enumerate(strategies)
            if not along[i].intersection(roles.not_batch)
            and not sequence[i].intersection(roles.not_sequence)
            and not _used(strategy).intersection(roles.idle)
        ]
        split = [(along[i] | across[i].intersection(roles.across)) for i in range(len(along))]
        allowed = _with_most(legal, split, roles.batch)
        if roles.sequence:
            allowed = _with_most(allowed, sequence, roles.sequence)
            split = [split[i] | sequence[i].intersection(roles.sequence) for i in range(len(split))]
        own = (*roles.batch, *roles.sequence)
        beside = own if is_whole else tuple(axis for axis in own if axis not in roles.sharded_state)
        if beside:
            allowed = [i for i in allowed if _whole_beside(strategies[i], split[i], beside)]
        if is_update and roles.sharded_state:
            allowed = [i for i in allowed if _is_on_shards_or_partial(strategies[i], roles)] or allowed
        return np.array(allowed, np.int64)


def _with_most(indices: Sequence[int], split: Sequence[set[str]], axes: Sequence[str]) -> list[int]:
    """Those of the strategies that split along a colour over most of the axes."""
    most = max((len(split[i].intersection(axes)) for i in indices), default=0)
    return [i for i in indices if len(split[i].intersection(axes)) >= most]


def _along(strategy: Strategy, colours: _TiedLeafDims | None) -> set[str]:
    """Axes splitting a dimension of the colour, in an operand or in the unreduced result."""
    if colours is None:
        return set()
    leaves = [
        *zip(strategy.operands, colours[0], strict=False),
        *zip(local_results(strategy), colours[1], strict=True),
    ]
    return {axis for sharding, dims in leaves for dim in dims for axis in sharding.dims[dim]}


def _used(strategy: Strategy) -> set[str]:
    return {axis for sharding in (*strategy.operands, *strategy.results) for axis in sharding.axes}


def _whole_beside(strategy: Strategy, along: set[str], axes: tuple[str, ...]) -> bool:
    """Whether `axes` split nothing but the batch, with sums over it whole on each of their devices."""
    scattered = {axis for sharding in strategy.results for axis in sharding.axes if axis in strategy.partial}
    return not (_used(strategy) - along).intersection(axes) and not scattered.intersection(axes)


def _is_on_shards_or_partial(strategy: Strategy, roles: Roles) -> bool:
    """Whether every result is split over the axes of sharded state in one dimension, or is a partial sum over them
    (scattered later, if it may be)."""
    axes = set(roles.sharded_state)
    may_wait = axes.isdisjoint(roles.scattered)
    return all(
        (may_wait and axes <= set(s.unreduced))
        or (axes <= set(s.axes) and sum(bool(axes.intersection(dim)) for dim in s.dims) == 1)
        for s in strategy.results
    )


def _only(strategy_set: StrategySet, indices: IntArray) -> StrategySet:
    if len(indices) == len(strategy_set):
        return strategy_set
    return strategy_set.subset(indices)


# ---- the update of state ---------------------------------------------------------


def _updates(flow: Dataflow, dims: Sequence[NodeDims], state_outputs: Sequence[int]) -> frozenset[int]:
    """Nodes of rank 1 and more used only in updates of state, starting at the sums over the batch (the gradients)."""
    candidates = _feeding(flow, dims, state_outputs)
    readers: dict[int, list[Node]] = {}
    for node in flow.nodes:
        for use in node.uses:
            readers.setdefault(use.source[0], []).append(node)
    outputs = set(state_outputs)
    todo = sorted(candidates, reverse=True)
    while todo:
        index = todo.pop()
        if index in candidates and not all(
            reader.index in candidates or reader.index in outputs or _is_scalar(reader)
            for reader in readers.get(index, ())
        ):
            candidates.discard(index)
            todo += [use.source[0] for use in flow.nodes[index].uses if use.source[0] in candidates]
    return frozenset(index for index in candidates if not _is_scalar(flow.nodes[index]))


def _reads(flow: Dataflow, dims: Sequence[NodeDims], output: int, arguments: frozenset[int]) -> bool:
    """Whether the update that gives an output reads one of the arguments, or is one of them."""
    region = _feeding(flow, dims, [output]) | {output}
    return any(use.source[0] in arguments for index in region for use in flow.nodes[index].uses) or output in arguments


def _feeding(flow: Dataflow, dims: Sequence[NodeDims], state_outputs: Sequence[int]) -> set[int]:
    """Inputs of the updated state, back to the gradients and to the arguments."""
    arguments = set(flow.parameters)
    inputs: set[int] = set()
    todo = [use.source[0] for output in state_outputs for use in flow.nodes[output].uses]
    while todo:
        node = flow.nodes[todo.pop()]
        if node.index in inputs or node.index in arguments or any(dims[node.index]):
            continue
        inputs.add(node.index)
        if not any(dims[source][leaf] for source, leaf in (use.source for use in node.uses)):
            todo += [use.source[0] for use in node.uses]
    return inputs


def _is_scalar(node: Node) -> bool:
    return not any(shape.dimensions for shape in node.shapes)
