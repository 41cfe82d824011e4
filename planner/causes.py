"""Why a collective is needed, in words that the user knows: tensors by name, operations by source line."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import PurePath

from shardwright.hlo import Instruction
from shardwright.planner.dataflow import Dataflow, Leaf, Node, Use

#: What rearranges a tensor and leaves it the tensor it was.
_VIEWS = frozenset({"convert", "copy", "transpose", "reshape", "broadcast", "bitcast"})

#: What makes a gradient: the way back from an update ends there.
_MAKERS = frozenset({"dot", "convolution", "reduce", "scatter", "gather", "dynamic-slice"})

_WORDS = {"dot": "matmul", "reduce": "sum", "gather": "lookup", "broadcast": "broadcasting"}


def is_backward(op_name: str) -> bool:
    """Whether JAX made the operation by transposing one of the forward pass."""
    return "transpose(" in op_name


class Causes:
    """Describes the moves and reductions of one program; argument and output names are the user's."""

    def __init__(self, flow: Dataflow, argument_names: Sequence[str], output_names: Sequence[str]) -> None:
        self._flow = flow
        self._arguments = dict(zip(flow.parameters, argument_names, strict=True))
        self._outputs = dict(zip(flow.outputs, output_names, strict=True))
        self._lines: dict[object, str] = {}
        self._gradients = self._gradient_names()

    def move(self, node: Node, use: Use) -> str:
        """`params['w'] for matmul (model.py:63)`: an operand that is brought to another sharding."""
        if node.index in self._arguments:
            return f"updated {self._arguments[node.index]}"
        if node.index in self._outputs:
            return f"output {self._outputs[node.index]}"
        return f"{self._value(use.source)} for {self._operation(node)}"

    def reduction(self, node: Node) -> str:
        """`gradient of params['w']`, or `partial sum of matmul (model.py:63)`."""
        name = self._gradients.get(node.index)
        return f"gradient of {name}" if name else f"partial sum of {self._operation(node)}"

    def _value(self, leaf: Leaf) -> str:
        node = self._flow.nodes[leaf[0]]
        while node.index not in self._arguments and node.uses and (node.is_value or node.instruction.opcode in _VIEWS):
            source = node.uses[0].source[0]
            if source >= node.index:
                break
            node = self._flow.nodes[source]
        if node.index in self._arguments:
            return self._arguments[node.index]
        if node.index in self._gradients:
            return f"gradient of {self._gradients[node.index]}"
        return f"result of {self._operation(node)}"

    def _operation(self, node: Node) -> str:
        instruction = node.instruction
        if node.is_value:
            words = {"while": "a loop", "parameter": "a called function"}.get(instruction.opcode, instruction.opcode)
        else:
            words = _WORDS.get(instruction.opcode, instruction.opcode)
        backward = "backward " if is_backward(instruction.op_name) else ""
        line = self._line(instruction)
        return f"{backward}{words} ({line})" if line else f"{backward}{words} {instruction.name}"

    def _line(self, instruction: Instruction) -> str:
        metadata = instruction.get("metadata") or {}
        key = metadata.get("stack_frame_id", (metadata.get("source_file"), metadata.get("source_line")))
        if key not in self._lines:
            found = self._flow.module.source(instruction)
            self._lines[key] = f"{PurePath(found.file).name}:{found.line}" if found else ""
        return self._lines[key]

    def _gradient_names(self) -> dict[int, str]:
        """Sums that update state of their own size, with the name of the first argument that they update."""
        found: dict[int, str] = {}
        nodes = self._flow.nodes
        for argument, name in self._arguments.items():
            size = prod(nodes[argument].shapes[0].dimensions)
            seen = {argument}
            todo = [use.source for use in nodes[argument].uses]
            while todo:
                index, leaf = todo.pop()
                node = nodes[index]
                if index in seen or index in self._arguments or prod(node.shapes[leaf].dimensions) != size:
                    continue
                seen.add(index)
                if node.instruction.opcode in _MAKERS and not self._keeps_size(node, size):
                    found.setdefault(index, name)
                else:
                    todo += [use.source for use in node.uses]
        return found

    def _keeps_size(self, node: Node, size: int) -> bool:
        """A sum over dimensions of size 1, as broadcasting leaves them behind."""
        source, leaf = node.uses[0].source
        return node.instruction.opcode == "reduce" and prod(self._flow.nodes[source].shapes[leaf].dimensions) == size
