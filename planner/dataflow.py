"""Who makes which array and who reads it: a module flattened to nodes over array leaves.

A node is one sharding decision: an instruction that computes, or a bare value
that is only handed on (an argument, an output, a value carried by a loop, a
parameter of a called computation, the result of a conditional, an annotated
array). Tuples, their elements, loops and calls are no nodes: their leaves are
followed through to the node that makes them.

A computation that several call sites share is planned once, for all of them.
Its nodes weigh as many executions as the sites together: trip counts of loops
multiply, where the condition compares a counter with a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.hlo import ArrayShape, Computation, Instruction, Module
from shardwright.planner.rules.tuples import IDENTITY_TARGETS
from shardwright.planner.trips import trip_count

#: (node number, array leaf of its result).
Leaf = tuple[int, int]

#: Instructions whose result leaves are operand leaves, in order.
_TRANSPARENT = frozenset({"tuple", "optimization-barrier", "opt-barrier", "domain", "add-dependency"})

#: Attributes through which control flow names the computations it runs.
CONTROL_FLOW = {
    "while": ("condition", "body"),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """An array that flows into operand leaf `position` of a node, `weight` times a step.

    hard: the two shardings must be equal (nothing can stand between them).
    """

    source: Leaf
    position: int
    weight: float
    hard: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One decision: `instruction` computed (`is_value` false), or leaf `leaf` of its result handed on.

    shapes: array leaves of the result. weight: executions a step.
    """

    index: int
    instruction: Instruction
    computation: str
    shapes: tuple[ArrayShape, ...]
    weight: float
    is_value: bool = False
    leaf: int = 0
    uses: list[Use] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Dataflow:
    """The nodes of a module in topological order (a loop's carried values come before its body).

    leaves: per instruction, the nodes that make its result leaves.
    parameters / outputs: node per flat array leaf of the entry's parameters / result; an output that
        shares its buffer with a parameter is that parameter's node.
    entering: per control-flow instruction, the values its operands' leaves are brought to.
    leaving: per root of the entry, a loop body or a branch, the values its leaves are brought to.
    aliases: output leaf → parameter leaf.
    computations: every planned computation, callers first.
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


def build_dataflow(module: Module) -> Dataflow:
    """Flatten `module`; notes name loops whose trip count is unknown."""
    return _Builder(module).build()


class _Builder:
    def __init__(self, module: Module) -> None:
        self._flow = Dataflow(module=module)
        self._trips: dict[Instruction, int] = {}
        self._weights: dict[Computation, float] = {}
        self._entered: dict[Computation, tuple[Leaf, ...]] = {}  # parameter leaves of a planned computation

    def build(self) -> Dataflow:
        flow, entry = self._flow, self._flow.module.entry
        self._weigh()
        for parameter in sorted(entry.parameters, key=lambda p: p.index):
            flow.leaves[parameter] = self._values(parameter, entry.name, 1.0)
            flow.parameters += [node for node, _ in flow.leaves[parameter]]
        self._enter(entry)
        self._outputs(entry)
        return flow

    # ---- executions of each computation ----------------------------------
    def _weigh(self) -> None:
        """Executions a step per computation, over all call sites (computations form a DAG)."""
        order = _called_order(self._flow.module.entry)
        self._weights = dict.fromkeys(order, 0.0)
        self._weights[self._flow.module.entry] = 1.0
        for computation in order:
            for instruction in computation:
                if instruction.opcode not in CONTROL_FLOW:
                    continue
                times = self._times(instruction)
                for name in CONTROL_FLOW[instruction.opcode]:
                    for callee in instruction.called.get(name, ()):
                        self._weights[callee] += times * self._weights[computation]

    def _times(self, instruction: Instruction) -> int:
        if instruction.opcode != "while":
            return 1
        count = trip_count(instruction)
        if count is None:
            self._flow.notes.append(f"{instruction.name}: trip count unknown, priced as one")
        self._trips[instruction] = 1 if count is None else count
        return self._trips[instruction]

    # ---- instructions ------------------------------------------------------
    def _enter(self, computation: Computation) -> None:
        self._flow.computations.append(computation)
        for instruction in computation:
            if instruction not in self._flow.leaves:
                self._flow.leaves[instruction] = self._visit(instruction, computation)

    def _visit(self, instruction: Instruction, computation: Computation) -> tuple[Leaf, ...]:
        opcode, leaves = instruction.opcode, self._flow.leaves
        weight = self._weights[computation]
        if opcode == "get-tuple-element":
            elements = instruction.operands[0].shape.elements  # type: ignore[union-attr]
            first = sum(len(element.leaves) for element in elements[: instruction.index])
            return leaves[instruction.operands[0]][first : first + len(instruction.shape.leaves)]
        if opcode in _TRANSPARENT:
            flat = [leaf for operand in instruction.operands for leaf in leaves[operand]]
            return tuple(flat[: len(instruction.shape.leaves)])
        if opcode == "while":
            return self._while(instruction, weight)
        if opcode == "call":
            return self._call(instruction, weight)
        if opcode == "conditional":
            return self._conditional(instruction, computation, weight)
        return self._compute(instruction, computation, weight)

    def _compute(self, instruction: Instruction, computation: Computation, weight: float) -> tuple[Leaf, ...]:
        flat = [leaf for operand in instruction.operands for leaf in self._flow.leaves[operand]]
        annotated = instruction.opcode == "custom-call" and instruction.get("custom_call_target") in IDENTITY_TARGETS
        node = self._node(instruction, computation.name, instruction.shape.leaves, weight)
        node.is_value = annotated and len(flat) == 1
        node.uses = [Use(source=leaf, position=i, weight=weight) for i, leaf in enumerate(flat)]
        return tuple((node.index, i) for i in range(len(node.shapes)))

    def _while(self, loop: Instruction, weight: float) -> tuple[Leaf, ...]:
        (body,), (condition,) = loop.called["body"], loop.called["condition"]
        carried = self._parameters(body, self._flow.leaves[loop.operands[0]], weight)
        self._tie(condition, carried)
        self._flow.entering[loop] = carried
        if body.root not in self._flow.leaving:
            self._enter(condition)
            self._enter(body)
            self._flow.leaving[body.root] = carried
            self._feed(body.root, carried, self._weights[body])
        return carried

    def _call(self, call: Instruction, weight: float) -> tuple[Leaf, ...]:
        (callee,) = call.called["to_apply"]
        flat = tuple(leaf for operand in call.operands for leaf in self._flow.leaves[operand])
        first = callee not in self._entered
        self._flow.entering[call] = self._parameters(callee, flat, weight)
        if first:
            self._enter(callee)
        return self._flow.leaves[callee.root]

    def _conditional(self, choice: Instruction, computation: Computation, weight: float) -> tuple[Leaf, ...]:
        branches = [b for name in CONTROL_FLOW["conditional"] for b in choice.called.get(name, ())]
        operands: tuple[Leaf, ...] = self._flow.leaves[choice.operands[0]]
        results = self._values(choice, computation.name, weight)
        for branch, operand in zip(branches, choice.operands[1:], strict=True):
            first = branch not in self._entered
            operands += self._parameters(branch, self._flow.leaves[operand], weight)
            if first:
                self._enter(branch)
            self._flow.leaving[branch.root] = results
            self._feed(branch.root, results, weight)
        self._flow.entering[choice] = operands
        return results

    def _parameters(self, callee: Computation, fed: tuple[Leaf, ...], weight: float) -> tuple[Leaf, ...]:
        """The leaves of a called computation's parameters, fed from one more call site."""
        if callee not in self._entered:
            own = [self._values(p, callee.name, 0.0) for p in sorted(callee.parameters, key=lambda p: p.index)]
            self._tie(callee, tuple(leaf for leaves in own for leaf in leaves))
        for (node, _), source in zip(self._entered[callee], fed, strict=True):
            self._flow.nodes[node].uses.append(Use(source=source, position=0, weight=weight))
        return self._entered[callee]

    def _tie(self, computation: Computation, parameters: tuple[Leaf, ...]) -> None:
        self._entered[computation] = parameters
        rest = parameters
        for parameter in sorted(computation.parameters, key=lambda p: p.index):
            count = len(parameter.shape.leaves)
            self._flow.leaves[parameter], rest = rest[:count], rest[count:]

    def _feed(self, root: Instruction, targets: tuple[Leaf, ...], weight: float) -> None:
        """The leaves of a computation's root flow into `targets`; only a tuple can reshard on the way."""
        for source, (node, _) in zip(self._flow.leaves[root], targets, strict=True):
            if source[0] != node:
                use = Use(source=source, position=0, weight=weight, hard=root.opcode != "tuple")
                self._flow.nodes[node].uses.append(use)

    # ---- nodes -------------------------------------------------------------
    def _node(self, instruction: Instruction, computation: str, shapes: tuple[ArrayShape, ...], weight: float) -> Node:
        node = Node(
            index=len(self._flow.nodes), instruction=instruction, computation=computation, shapes=shapes, weight=weight
        )
        self._flow.nodes.append(node)
        return node

    def _values(self, instruction: Instruction, computation: str, weight: float) -> tuple[Leaf, ...]:
        """A bare value per array leaf of `instruction`'s result."""
        made = []
        for i, shape in enumerate(instruction.shape.leaves):
            node = self._node(instruction, computation, (shape,), weight)
            node.is_value, node.leaf = True, i
            made.append((node.index, 0))
        return tuple(made)

    def _outputs(self, entry: Computation) -> None:
        """One value per output leaf; an output that may reuse an argument's buffer is that argument's value."""
        flow, root = self._flow, entry.root
        flow.aliases = _flat_aliases(flow.module)
        made = flow.leaves[root]
        targets: list[Leaf] = []
        for i, shape in enumerate(root.shape.leaves):
            if i in flow.aliases:
                targets.append((flow.parameters[flow.aliases[i]], 0))
            else:
                node = self._node(root, entry.name, (shape,), 1.0)
                node.is_value, node.leaf = True, i
                targets.append((node.index, 0))
        for source, (node_index, _) in zip(made, targets, strict=True):
            if source[0] != node_index:
                flow.nodes[node_index].uses.append(Use(source=source, position=0, weight=1.0))
        flow.outputs = [node for node, _ in targets]
        flow.leaving[root] = tuple(targets)


def _flat_aliases(module: Module) -> dict[int, int]:
    """Output leaf → parameter leaf, both counted flat over all arrays."""
    parameters = sorted(module.entry.parameters, key=lambda p: p.index)
    first = [0]
    for parameter in parameters:
        first.append(first[-1] + len(parameter.shape.leaves))
    found = {}
    for alias in module.aliases:
        output = _flat_index(module.entry.root.shape, alias.output_index)
        argument = first[alias.parameter_number] + _flat_index(
            parameters[alias.parameter_number].shape, alias.parameter_index
        )
        found[output] = argument
    return found


def _flat_index(shape: object, path: tuple[int, ...]) -> int:
    flat = 0
    for step in path:
        elements = shape.elements  # type: ignore[attr-defined]
        flat += sum(len(element.leaves) for element in elements[:step])
        shape = elements[step]
    return flat


def _called_order(entry: Computation) -> list[Computation]:
    """Computations that control flow reaches from `entry`, every caller before its callees."""
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


def _callees(computation: Computation) -> list[Computation]:
    return [
        callee
        for instruction in computation
        if instruction.opcode in CONTROL_FLOW
        for name in CONTROL_FLOW[instruction.opcode]
        for callee in instruction.called.get(name, ())
    ]
