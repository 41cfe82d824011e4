"""The coarse parts of a step: the units of a cut into stages.

The forward pass is divided at its products, convolutions, gathers and loops: each starts a part. The instructions
between (activations, norms, residual sums) join the last part they read: values only go from lower numbers to higher
ones. A checkpoint (`jax.checkpoint`) ends a part. A loop over stacked layers becomes one part per row.
`backward_placement` places everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.hlo import Module
from shardwright.planner.graph.canonical_order import canonical_order
from shardwright.planner.graph.dataflow import BARRIERS, Dataflow, build_dataflow
from shardwright.planner.rewrites.stacked_loops import StackedLoop, match_stacked_loop
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES, forward_nodes
from shardwright.planner.segments.variables import cheap_nodes
from shardwright.planner.stages.backward_placement import BackwardPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarsePart:
    """A coarse part: some entry nodes, or row `row` of a loop over `rows` layers with its own nodes."""

    name: str
    row: int = 0
    rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """A step's entry computation in coarse parts.

    flow: the entry; each loop is one node.
    parts: the parts, by number.
    first: per node the number of its part (of row 0's, in a stack), -1 if rematerialized per reader.
    forward: nodes of the forward pass.
    fed: other nodes read by it.
    once: nodes run once a step.
    stacks: loop over layers → its stacked arrays.
    state: nodes of arguments without the batch.
    ending: nodes placed with a stack's last row.
    """

    flow: Dataflow
    parts: tuple[CoarsePart, ...]
    first: tuple[int, ...]
    forward: frozenset[int]
    fed: frozenset[int]
    once: frozenset[int]
    stacks: Mapping[int, StackedLoop]
    state: frozenset[int]
    ending: frozenset[int]

    def part(self, node: int) -> int:
        """The part of a node other than a loop over layers; -1 if rematerialized per reader."""
        first = self.first[node]
        return first + self.parts[first].rows - 1 if node in self.ending else first

    def members(self, node: int) -> range:
        """The parts of a node: one, or every row of its stack."""
        first = self.first[node]
        if first < 0:
            return range(0)
        rows = self.parts[first].rows
        is_stacked = node in self.stacks or any(s.dimensions[:1] == (rows,) for s in self.flow.nodes[node].shapes)
        own = self.part(node)
        return range(first, first + rows) if is_stacked else range(own, own + 1)


def cluster_step(module: Module, state: Collection[int], once: Collection[str]) -> Clustering:
    """The parts of a module, calls inlined.

    state: flat numbers of the arguments without the batch. once: names of entry instructions run once a step.
    Raises PlanError without a loss (a scalar result of batch and state): its inputs are the forward pass to divide.
    """
    flow = build_dataflow(module, is_flat=True)
    free = cheap_nodes(flow, ())
    state_nodes = frozenset(flow.parameters[number] for number in state)
    updates = [node.index for node in flow.nodes if not node.is_value and node.instruction.name in once]
    forward = canonical_order(flow, set(forward_nodes(flow, free, state_nodes, frozenset(updates))).difference(updates))
    if not forward:
        raise PlanError(
            "no result is a single number made of the batch and of other arguments: there is no pass to cut",
            where="stages",
            remedy="return the loss, or plan with stages=1",
        )
    stacks = _stacks(flow, frozenset(forward))
    of_forward, heads = _divide(flow, forward, {i for group in stacks for i in group})
    with_forward = {i: of_forward[ahead] for group in stacks for i in group for ahead in group if ahead in of_forward}
    placing = BackwardPlacement(
        flow=flow,
        free=free,
        state=state_nodes,
        of_forward=of_forward,
        settled=with_forward,
        once=updates,
        count=len(heads),
    )
    of, count = placing.run()
    parts, first, loops = _expand_stacks(flow, of, count, forward, stacks)
    return Clustering(
        flow=flow,
        parts=parts,
        first=first,
        forward=frozenset(forward),
        fed=placing.fed,
        once=frozenset(updates),
        stacks=loops,
        state=state_nodes,
        ending=_ending(flow, {i for i, part in enumerate(first) if part >= 0 and parts[part].rows > 1}, loops),
    )


def _ending(flow: Dataflow, beside: Collection[int], stacks: Mapping[int, StackedLoop]) -> frozenset[int]:
    """Nodes placed with loops over layers: the readers of a forward loop and no backward one."""
    ahead = {i for i, stack in stacks.items() if not stack.is_descending}
    behind = set(stacks).difference(ahead)
    for node in flow.nodes:
        sources = {use.source[0] for use in node.uses}
        if node.index in beside and node.index not in stacks:
            if not behind.isdisjoint(sources):
                behind.add(node.index)
            elif not ahead.isdisjoint(sources):
                ahead.add(node.index)
    return frozenset(ahead.difference(stacks))


def _expand_stacks(
    flow: Dataflow,
    of: Sequence[int],
    count: int,
    forward: Sequence[int],
    stacks: Mapping[tuple[int, ...], Mapping[int, StackedLoop]],
) -> tuple[tuple[CoarsePart, ...], tuple[int, ...], dict[int, StackedLoop]]:
    """Replaces each part consisting of one forward loop over layers by one part per row."""
    ahead: list[list[int]] = [[] for _ in range(count)]
    for i in forward:
        ahead[of[i]].append(i)
    loops = {ahead_i: group for group in stacks for ahead_i in group if ahead_i in forward}
    parts: list[CoarsePart] = []
    starts: list[int] = []
    expanded: dict[int, StackedLoop] = {}
    for members in ahead:
        starts.append(len(parts))
        head = flow.nodes[members[0]].instruction
        rows = 1
        if len(members) == 1 and members[0] in loops:
            group = loops[members[0]]
            expanded.update(stacks[group])
            rows = stacks[group][members[0]].rows
        parts += [CoarsePart(name=head.op_name or head.name, row=row, rows=rows) for row in range(rows)]
    return tuple(parts), tuple(-1 if part < 0 else starts[part] for part in of), expanded


# ---- the forward pass ---------------------------------------------------------


def _divide(flow: Dataflow, forward: Sequence[int], stacked: Collection[int]) -> tuple[dict[int, int], list[int]]:
    """The part of every forward node, and the first node of each part."""
    checkpoints = _checkpoints(flow)
    of: dict[int, int] = {}
    heads: list[int] = []
    for i in forward:
        node = flow.nodes[i]
        joined = [of[use.source[0]] for use in node.uses if use.source[0] in of and use.source[0] not in checkpoints]
        last = max((of[use.source[0]] for use in node.uses if use.source[0] in of), default=-1)
        if last not in joined or node.instruction.opcode in CHOICE_OPCODES or heads[last] in stacked:
            last = len(heads)
            heads.append(i)
        of[i] = last
    return of, heads


def _checkpoints(flow: Dataflow) -> set[int]:
    """Operands of barriers: the inputs of a recomputation."""
    return {use.source[0] for node in flow.nodes if node.instruction.opcode in BARRIERS for use in node.uses}


def _stacks(flow: Dataflow, forward: frozenset[int]) -> dict[tuple[int, ...], dict[int, StackedLoop]]:
    """Loops over layers that can be cut between rows, grouped by shared arrays: one forward loop, the rest after it."""
    layer_loops = {
        node.index: loop
        for node in flow.nodes
        if node.instruction.opcode == "while" and not node.is_value and (loop := match_stacked_loop(node.instruction))
    }
    groups = {}
    for group in _sharing(flow, layer_loops):
        ahead = [i for i in group if i in forward]
        is_uniform = len(ahead) == 1 and len({layer_loops[i].rows for i in group}) == 1
        if is_uniform and all(layer_loops[i].is_descending != (i in forward) for i in group):
            groups[tuple(group)] = {i: layer_loops[i] for i in group}
    return groups


def _sharing(flow: Dataflow, stacks: Mapping[int, StackedLoop]) -> list[list[int]]:
    """Loops grouped by shared arrays."""
    group_of = {i: i for i in stacks}
    owner: dict[tuple[int, int], int] = {}
    for i, stack in stacks.items():
        touched = [use.source for use in flow.nodes[i].uses if use.position in stack.reads]
        touched += [(i, element) for element in stack.writes]
        for leaf in touched:
            other, mine = group_of[owner.setdefault(leaf, i)], group_of[i]
            group_of = {k: mine if group == other else group for k, group in group_of.items()}
    groups: dict[int, list[int]] = {}
    for i, group in group_of.items():
        groups.setdefault(group, []).append(i)
    return list(groups.values())
