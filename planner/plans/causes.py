"""Explains each collective in the user's terms: tensors by name, operations by source line."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.hlo import Instruction
from shardwright.hlo.opcodes import COLLECTIVES
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node, Use
from shardwright.planner.rules.reduction import reduction_of
from shardwright.planner.tuning import MAX_GRADIENT_PARTS

#: Instructions that rearrange a tensor, or slice one layer of a stack, and keep its identity.
_VIEWS = frozenset({"convert", "copy", "transpose", "reshape", "broadcast", "bitcast", "dynamic-slice"})

#: Producers of gradients: the path back from an update ends there.
_MAKERS = frozenset({"dot", "convolution", "reduce", "scatter", "gather", "dynamic-slice"})

#: Instructions that add parts of a gradient, or forward one; and the maximum number of parts.
_SUMS = _VIEWS | {"add", "concatenate", "pad"}

_WORDS = {"dot": "matmul", "gather": "lookup", "broadcast": "broadcasting"}

#: Instructions that combine values by a region.
_COMBINING = frozenset({"reduce", "reduce-window", "scatter"})

#: Words for binary combinations, if other than HLO's.
_COMBINATIONS = {"add": "sum", "multiply": "product"}


def is_backward(op_name: str) -> bool:
    """Whether JAX created the operation by transposing one of the forward pass."""
    return "transpose(" in op_name


def _reduction_word(instruction: Instruction) -> str:
    """The word for the combination of an instruction's partial results; `reduction` by default, e.g. argmax."""
    if instruction.opcode not in _COMBINING:
        return "sum"
    combination = reduction_of(instruction.called["to_apply"][0])
    return _COMBINATIONS.get(combination, combination) if combination else "reduction"


class Causes:
    """Describes the moves and reductions of one program; argument and output names are the user's."""

    def __init__(self, flow: Dataflow, argument_names: Sequence[str], output_names: Sequence[str]) -> None:
        self._flow = flow
        self._arguments = dict(zip(flow.parameters, argument_names, strict=True))
        self._outputs = dict(zip(flow.outputs, output_names, strict=True))
        self._lines: dict[object, str] = {}
        self._loops = {
            body.name: instruction
            for computation in flow.computations
            for instruction in computation
            if instruction.opcode == "while"
            for body in instruction.called["body"]
        }
        self._gradients = self._gradient_names()

    def move(self, node: Node, use: Use) -> str:
        """`params['w'] for matmul (model.py:63)`: an operand resharded for its reader."""
        if node.index in self._arguments:
            return f"updated {self._arguments[node.index]}"
        if node.index in self._outputs:
            return f"output {self._outputs[node.index]}"
        gradient = self._gradient(self._flow.nodes[use.source[0]])
        return f"gradient of {gradient}" if gradient else f"{self._value(use.source)} for {self._operation(node)}"

    def exchange(self, node: Node, kind: str) -> str:
        """`borders for convolution (model.py:63)` of neighbours, `partial results of reduction (model.py:63)`, or, in a
        manual region, `of the program, all-gather all_gather (model.py:63)`."""
        if node.instruction.opcode in COLLECTIVES:
            return f"of the program, {self._operation(node)}"
        what = "borders for" if kind == "collective-permute" else "partial results of"
        return f"{what} {self._operation(node)}"

    def reduction(self, node: Node) -> str:
        """`gradient of params['w']`, `partial sum of matmul (model.py:63)`, `partial maximum of scatter (…)`."""
        name = self._gradient(node)
        return (
            f"gradient of {name}" if name else f"partial {_reduction_word(node.instruction)} of {self._operation(node)}"
        )

    def _gradient(self, node: Node) -> str | None:
        """The argument whose gradient a node computes, or sums from parts computed elsewhere."""
        seen, todo = {node.index}, [node.index]
        while todo and len(seen) < MAX_GRADIENT_PARTS:
            index = todo.pop(0)
            if index in self._gradients:
                return self._gradients[index]
            sources = [source for source in self._parts(self._flow.nodes[index]) if source not in seen]
            seen.update(sources)
            todo += sources
        return None

    def _parts(self, node: Node) -> list[int]:
        """The terms of a sum, the inputs of a carried value, or the update of a stack."""
        if node.index in self._arguments:
            return []
        if node.instruction.opcode == "dynamic-update-slice" and not node.is_value:
            return [node.uses[1].source[0]]
        if node.instruction.opcode == "reduce" and self._keeps_size(node, prod(node.shapes[0].dimensions)):
            return [node.uses[0].source[0]]
        if node.is_value or node.instruction.opcode in _SUMS:
            return [use.source[0] for use in node.uses]
        return []

    def _value(self, leaf: Leaf) -> str:
        """`params['w']`; `params['blocks']['w'][i]` for a stack that a loop reads slice by slice; else its producer."""
        node = self._flow.nodes[leaf[0]]
        seen = {node.index}
        is_slice = False
        while node.index not in self._arguments:
            source = self._origin(node)
            if source is None or source in seen:
                break
            is_slice |= node.instruction.opcode == "dynamic-slice" and not node.is_value
            node = self._flow.nodes[source]
            seen.add(source)
        if node.index in self._arguments:
            return self._arguments[node.index] + ("[i]" if is_slice else "")
        return f"{'saved ' if is_slice else ''}result of {self._operation(node)}"

    def _origin(self, node: Node) -> int | None:
        """The node that computed a forwarded value; for a stack filled by a loop, the update."""
        if not node.uses or not (node.is_value or node.instruction.opcode in _VIEWS):
            return None
        if node.is_value:
            for use in node.uses:
                source = self._flow.nodes[use.source[0]]
                if source.instruction.opcode == "dynamic-update-slice":
                    return source.uses[1].source[0]
        return node.uses[0].source[0]

    def _operation(self, node: Node) -> str:
        instruction = node.instruction
        opcode = instruction.opcode
        words = _reduction_word(instruction) if opcode == "reduce" else _WORDS.get(opcode, opcode)
        if node.is_value:
            instruction = self._loops.get(node.computation, instruction)
            words = {"while": "a loop", "parameter": "a called function"}.get(instruction.opcode, instruction.opcode)
        around = self._loops.get(node.computation, instruction)
        backward = "backward " if is_backward(instruction.op_name) or is_backward(around.op_name) else ""
        line = self._line(instruction)
        return f"{backward}{words} ({line})" if line else f"{backward}{words} {instruction.name}"

    def _line(self, instruction: Instruction) -> str:
        metadata = instruction.get("metadata") or {}
        lines = metadata.get("stack_frame_id", (metadata.get("source_file"), metadata.get("source_line")))
        key = (lines, instruction.op_name)
        if key not in self._lines:
            self._lines[key] = self._flow.module.place(instruction)
        return self._lines[key]

    def _gradient_names(self) -> dict[int, str]:
        """Sums that update state of their own size, with the name of the first argument they update.

        A loop computes the gradient of a stack layer by layer: before an update of the stack, the layer's size counts.
        """
        gradients: dict[int, str] = {}
        nodes = self._flow.nodes
        for argument, name in self._arguments.items():
            size = prod(nodes[argument].shapes[0].dimensions)
            seen = {argument}
            todo = [(use.source, size) for use in nodes[argument].uses]
            while todo:
                (index, leaf), size = todo.pop()
                node = nodes[index]
                if index in seen or index in self._arguments or prod(node.shapes[leaf].dimensions) != size:
                    continue
                seen.add(index)
                if node.instruction.opcode == "dynamic-update-slice" and not node.is_value:
                    layer, layer_leaf = node.uses[1].source
                    todo.append((node.uses[1].source, prod(nodes[layer].shapes[layer_leaf].dimensions)))
                if node.instruction.opcode in _MAKERS and not self._keeps_size(node, size):
                    gradients.setdefault(index, name)
                else:
                    todo += [(use.source, size) for use in node.uses]
        return gradients

    def _keeps_size(self, node: Node, size: int) -> bool:
        """Whether a node is a sum over dimensions of size 1, a residue of broadcasting."""
        source, leaf = node.uses[0].source
        return node.instruction.opcode == "reduce" and prod(self._flow.nodes[source].shapes[leaf].dimensions) == size
