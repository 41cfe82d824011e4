"""Library kernels of XLA:CPU that fuse whole chains around a reduction.

After XLA's LibraryRewriter and YnnMatcher (xla/backends/cpu/transforms/library_rewriter.cc, ynn_matcher.h, jaxlib
0.10.2), which precede loop fusion. Around each reduction, the last first, a kernel grows: downward to the only reader
of its result, upward to operands with no other reader. It absorbs products, and other such kernels. A value with other
readers stays outside and is stored, however cheap. Example: the divisor of a softmax, broadcast to the size of the
scores, if its gradient is part of such a kernel and its quotient is not.

Left out: XLA's limit on a kernel's size, reductions over windows, padding, and layouts unsupported by the library.
"""

from __future__ import annotations

from shardwright.cost.opcodes import IDENTITIES
from shardwright.cost.peak.device_program import DeviceProgram

#: Minimum elements of an instruction's largest shape that justify a library call.
MIN_ELEMENTS = 4096

#: Entry of a node outside all reduction kernels.
OUTSIDE = -1

_ELEMENTWISE = frozenset({
    "abs", "add", "ceil", "convert", "divide", "erf", "exponential", "exponential-minus-one", "floor", "log",
    "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "power", "round-nearest-even", "rsqrt",
    "sign", "sqrt", "subtract", "tanh",
})  # fmt: skip

_RESHAPES = IDENTITIES | {"broadcast"}

_REDUCERS = frozenset({"add", "maximum", "minimum"})

_FLOATS = frozenset({"bf16", "f32", "f64"})


def library_kernels(program: DeviceProgram) -> list[int]:
    """Per node, the stored node of its kernel, or OUTSIDE.

    A product outside every reduction's kernel is a kernel by itself: OUTSIDE.
    """
    growing = _KernelGrowth(program)
    for node in range(len(program.opcodes) - 1, -1, -1):
        if program.opcodes[node] == "reduce" and growing.last[node] == OUTSIDE and growing.can_take(node):
            growing.grow(node)
    return growing.last


class _KernelGrowth:
    def __init__(self, program: DeviceProgram) -> None:
        self.program = program
        self.users = program.users()
        self.last = [OUTSIDE] * len(program.opcodes)
        self.members: dict[int, set[int]] = {}

    def grow(self, reduction: int) -> None:
        """Grow the largest kernel around a reduction."""
        inside, last = {reduction}, reduction
        while True:
            self._take_in_operands(inside)
            below = self._only_reader(last)
            if not below:
                break
            inside |= below
            last = max(below)
        for node in inside:
            self.members.pop(node, None)
            self.last[node] = last
        self.members[last] = inside

    def can_take(self, node: int) -> bool:
        """Whether the library computes an instruction, profitably."""
        program, opcode = self.program, self.program.opcodes[node]
        if not self._is_float(node):
            return False
        if opcode == "dot" or opcode in _RESHAPES:
            return True
        operands = program.operands[node]
        if max(program.elements[member] for member in (node, *operands)) < MIN_ELEMENTS:
            return False
        if opcode == "reduce":
            (applied,) = program.instructions[node].called["to_apply"]
            return len(operands) == 2 and applied.root.opcode in _REDUCERS
        return opcode in _ELEMENTWISE and all(map(self._is_float, operands))

    def _is_float(self, node: int) -> bool:
        leaves = self.program.instructions[node].shape.leaves
        return len(leaves) == 1 and leaves[0].element_type in _FLOATS

    def _kernel(self, node: int) -> set[int]:
        """The nodes of the reduction kernel that computes a node; the node alone outside such kernels."""
        return {node} if self.last[node] == OUTSIDE else self.members[self.last[node]]

    def _only_reader(self, node: int) -> set[int]:
        """The only kernel that reads a node, if the library can absorb it; else an empty set."""
        users = self.users[node]
        if not users:
            return set()
        kernel = self._kernel(users[0])
        is_taken = self.last[users[0]] != OUTSIDE or self.can_take(users[0])
        return kernel if is_taken and kernel.issuperset(users) else set()

    def _take_in_operands(self, inside: set[int]) -> None:
        """Add operands read only by nodes inside."""
        todo = sorted(inside, reverse=True)
        while todo:
            for operand in self.program.operands[todo.pop()]:
                if operand in inside or not inside.issuperset(self.users[operand]):
                    continue
                if self.last[operand] != OUTSIDE or self.can_take(operand):
                    kernel = self._kernel(operand)
                    inside |= kernel
                    todo += sorted(kernel)
