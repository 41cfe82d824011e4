"""Fusion: the values a program stores, and those computed only inside their readers' kernels.

After XLA's InstructionFusion (xla/service/instruction_fusion.cc, cpu_instruction_fusion.cc), decided per value instead
of per kernel:

- a cheap value is fused into every kernel able to fuse it;
- a value with several large operands only if all its readers can;
- an expensive value only into a single reading kernel that reads no element twice.

Left out: XLA's limit on code duplication.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.opcodes import ELEMENTWISE, EXPENSIVE, IDENTITIES, LOOPS, PRODUCTS, TUPLE_VIEWS
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.dot_decomposer import REORDERED
from shardwright.cost.peak.gather_layouts import find_gather_layouts
from shardwright.cost.peak.layout_assignment import TRANSPOSED
from shardwright.cost.peak.library_fusion import OUTSIDE, library_kernels
from shardwright.cost.peak.tile_padding import is_relayout
from shardwright.cost.profiles import Compiler

#: Instructions that read an element of an operand more than once.
_REPEATING = frozenset({"broadcast", "gather", "pad", "reduce"})

#: Parts of logistic functions and softmaxes.
_QUOTIENTS = frozenset({"divide", "exponential", "logistic"})

#: Minimum size of a concatenation along the last dimension in a separate kernel.
_SMALL_CONCATENATION_BYTES = 2048

_MANY = -1


@dataclass(slots=True, kw_only=True)
class Kernels:
    """Result of fusion.

    is_stored: nodes with a kernel of their own, or views of a kernel's result.
    is_view: nodes whose value is (part of) their operand.
    reads: per stored node, the stored nodes it reads; True if each element of the result only needs the element at the
        same place and may overwrite it.
    is_library: nodes in a library kernel that computes more than the node: it overwrites no operand.
    """

    is_stored: list[bool]
    is_view: list[bool]
    is_library: list[bool]
    reads: list[dict[int, bool]]


def fuse(program: DeviceProgram, compiler: Compiler) -> Kernels:
    """Decide the values that `compiler` stores of a program."""
    return _Fusion(program, compiler).run()


class _Fusion:
    def __init__(self, program: DeviceProgram, compiler: Compiler) -> None:
        self.program = program
        self.compiler = compiler
        self.users = program.users()
        self.columns = find_gather_layouts(program) if compiler.runs("copies_gathered") else frozenset[int]()
        self.loops = LOOPS | {"reduce"} if compiler.reduce_takes_in == "loops" else LOOPS
        count = len(program.opcodes)
        self.is_stored = [True] * count
        self.is_taken_in = [False] * count  # fused into every reader able to
        self.home = list(range(count))  # the one kernel that computes it, or _MANY
        self.is_repeated = [False] * count  # its kernel reads elements of it repeatedly
        # Kernels that fuse loops; nodes fused into a reduction unable to do so are closed.
        self.library = library_kernels(program) if compiler.reduce_takes_in == "library" else [OUTSIDE] * count
        self.is_open = [
            opcode in self.loops and not self._is_copying(node) and self.library[node] == OUTSIDE
            for node, opcode in enumerate(program.opcodes)
        ]
        self.is_relayout = [
            compiler.runs("copies_relayouts")
            and (is_relayout(program.instructions[node], opcode) or program.marks.get(node) == TRANSPOSED)
            for node, opcode in enumerate(program.opcodes)
        ]
        # Nodes computed in a convolution's kernel.
        self.is_convolved = [
            compiler.runs("products_take_in") and opcode == "convolution" for opcode in program.opcodes
        ]
        self.is_open = [is_open and not other for is_open, other in zip(self.is_open, self.is_relayout, strict=True)]
        self.is_loop = list(self.is_open)
        self.joined: dict[int, int] = {}  # kernel → the multi-result kernel it is part of
        self.is_last = self._are_last()
        self.has_product = [opcode in PRODUCTS for opcode in program.opcodes]
        if compiler.runs("products_take_in"):
            self.is_open = [is_open or product for is_open, product in zip(self.is_open, self.has_product, strict=True)]

    def run(self) -> Kernels:
        for node in range(len(self.program.opcodes) - 1, -1, -1):
            self._decide(node)
        return self._kernels()

    def _decide(self, node: int) -> None:
        users = self.users[node]
        if not users:
            return
        if self.library[node] != OUTSIDE:
            self.is_taken_in[node] = self.library[node] != node
            self.is_stored[node] = not self.is_taken_in[node]
            return
        if self.compiler.runs("products_take_in") and self.program.opcodes[node] in PRODUCTS:
            self._decide_product(node)
            return
        if not self.is_loop[node]:
            return
        takers = [user for user in users if self._can_fuse(user, node)]
        if not takers:
            return
        if self.compiler.runs("products_take_in") and self._is_rounded_product(node):
            return
        everybody = len(takers) == len(users)
        if self._is_expensive(node):
            home = self._only_kernel(takers[0])
            one = everybody and home != _MANY and all(self._only_kernel(user) == home for user in takers)
            repeated = any(self.is_repeated[user] or self._repeats(user, node) for user in takers)
            fused = one and not repeated
        elif everybody:
            fused = not self._is_costly_for_convolution(node) or self._is_cheap_to_repeat(node)
        else:
            fused = (
                self.compiler.runs("repeats_cheap") and self._is_cheap_to_repeat(node) and not self._ends_product(node)
            )
        if not fused:
            return
        self.is_taken_in[node] = True
        self.is_stored[node] = not everybody
        homes = {self._only_kernel(user) for user in takers} | ({node} if not everybody else set())
        self.home[node] = self._one_of(homes)
        self.is_convolved[node] = any(self.is_convolved[user] for user in takers)
        self.is_repeated[node] = any(self.is_repeated[user] or self._repeats(user, node) for user in takers)
        self.is_open[node] = self.is_open[takers[0]]

    def _is_costly_for_convolution(self, node: int) -> bool:
        """Whether several kernels would compute a node, one of them a convolution, once per window position."""
        users = self.users[node]
        homes = {self._only_kernel(user) for user in users}
        return (len(homes) > 1 or _MANY in homes) and any(self.is_convolved[user] for user in users)

    def _ends_product(self, node: int) -> bool:
        """Whether a node is the last value of a product's kernel: other readers then read that value."""
        opcodes, operands = self.program.opcodes, self.program.operands[node]
        return self.compiler.runs("products_take_in") and any(
            opcodes[operand] in PRODUCTS and self.users[operand] == [node] for operand in operands
        )

    def _only_kernel(self, node: int) -> int:
        """The only kernel that computes a node, or _MANY."""
        home = self.home[node]
        while home in self.joined:
            home = self.joined[home]
        return home

    def _one_of(self, homes: set[int]) -> int:
        """The only kernel that computes the values of these homes. Several final kernels of equal size, e.g. the
        updates of a variable and its moments, form one kernel of several results.
        """
        if len(homes) == 1:
            return homes.pop()
        sizes = {self.program.elements[home] for home in homes}
        if _MANY in homes or len(sizes) > 1 or not all(self.is_last[home] for home in homes):
            return _MANY
        first, *others = sorted(homes)
        self.joined |= dict.fromkeys(others, first)
        self.has_product[first] |= any(self.has_product[other] for other in others)
        return first

    def _are_last(self) -> list[bool]:
        """Per node, whether all its transitive readers are elementwise, up to the program's results."""
        program = self.program
        last = [False] * len(program.opcodes)
        if self.compiler.runs("products_take_in"):
            for node in range(len(last) - 1, -1, -1):
                if program.opcodes[node] in ELEMENTWISE | IDENTITIES:
                    last[node] = all(user == program.root or last[user] for user in self.users[node])
        return last

    def _decide_product(self, node: int) -> None:
        """Fuse a product into the kernel of its elementwise readers: at most one per kernel."""
        if not self._read_by_elements(node):
            return
        home = self._one_of({self._only_kernel(user) for user in self.users[node]})
        if home == _MANY:
            return
        if self.has_product[home] or not self.is_open[home]:
            return
        self.has_product[home] = self.is_loop[node] = True
        self.is_taken_in[node], self.is_stored[node], self.home[node] = True, False, home

    def _read_by_elements(self, node: int) -> bool:
        return all(self.program.opcodes[user] in ELEMENTWISE | IDENTITIES for user in self.users[node])

    def _is_rounded_product(self, node: int) -> bool:
        """Whether a node is read by products alone, in bfloat16, and elementwise from another product. That product's
        kernel stores it, unless its readers recompute it from values stored anyway.
        """
        program = self.program
        (leaf, *others) = program.instructions[node].shape.leaves
        is_rounded = leaf.element_type == "f32" and program.sizes_bytes[node] == (2 * program.elements[node],)
        if others or not is_rounded or any(program.opcodes[user] not in PRODUCTS for user in self.users[node]):
            return False
        todo, inside, products = [node], {node}, set[int]()
        while todo:
            for operand in program.operands[todo.pop()]:
                if program.opcodes[operand] in PRODUCTS:
                    products.add(operand)
                elif program.opcodes[operand] in ELEMENTWISE and inside.issuperset(self.users[operand]):
                    inside.add(operand)
                    todo.append(operand)
        if any(program.marks.get(user) == REORDERED for user in self.users[node]):
            return bool(products)  # a copy cannot fuse: its operand is stored too
        return any(inside.issuperset(self.users[product]) for product in products)

    def _can_fuse(self, user: int, node: int) -> bool:
        """Whether the kernel of `user` can compute `node`."""
        if self.library[user] != OUTSIDE:  # decided before layout assignment
            return self.library[node] == self.library[user]
        if self.is_open[user]:
            return self.is_loop[node] and not self._is_cut_for_product(user)
        if self.program.opcodes[user] == "reduce":
            return self.program.opcodes[node] in ELEMENTWISE and len(self.users[node]) == 1
        return False

    def _is_cut_for_product(self, node: int) -> bool:
        """Whether a node is a slice read by a product's kernel: it computes no more elements than it reads."""
        if not self.compiler.runs("products_take_in") or self.program.opcodes[node] != "dynamic-slice":
            return False
        return all(self.has_product[self._only_kernel(user)] for user in self.users[node])

    def _is_copying(self, node: int) -> bool:
        """Whether a node is a concatenation along the last dimension, moving whole pieces."""
        program = self.program
        if program.opcodes[node] != "concatenate" or sum(program.sizes_bytes[node]) < _SMALL_CONCATENATION_BYTES:
            return False
        if node in program.marks:
            return program.marks[node] == ("edges", True)
        instruction = program.instructions[node]
        (along,) = instruction.get("dimensions", (0,))
        rank = instruction.shape.leaves[0].rank
        return rank > 1 and along == rank - 1

    def _is_expensive(self, node: int) -> bool:
        opcode = self.program.opcodes[node]
        if self.compiler.runs("repeats_expensive") and opcode in ELEMENTWISE:
            return False
        if self.compiler.runs("repeats_quotients") and opcode in _QUOTIENTS:
            return False
        if opcode in ("divide", "remainder"):
            return self.program.constant_of(self.program.operands[node][1]) is None
        if opcode == "convert":
            return self._is_rounding_to_bf16(node)
        return opcode in EXPENSIVE

    def _is_rounding_to_bf16(self, node: int) -> bool:
        """Whether a conversion halves an element to two bytes. f32 to bf16 needs tests for NaN; all other conversions
        are cheap.
        """
        program = self.program
        (size,), (before,) = program.sizes_bytes[node], program.sizes_bytes[program.operands[node][0]]
        return size == 2 * program.elements[node] and before == 2 * size

    def _is_cheap_to_repeat(self, node: int) -> bool:
        """Whether recomputing a node reads no more data than its result."""
        program = self.program
        operands = set(program.operands[node])
        if sum(program.elements[operand] for operand in operands) <= program.elements[node]:
            return True
        rank = program.rank(node)
        large = [
            operand
            for operand in program.operands[node]
            if (program.opcodes[operand] not in ("broadcast", "iota") or self._is_copied_for(node, operand))
            and not (program.opcodes[operand] == "constant" and program.elements[operand] <= 1)
            and program.rank(operand) >= rank
        ]
        return len(large) <= 1

    def _is_copied_for(self, node: int, operand: int) -> bool:
        """Whether a node reads a copy of an operand whose other readers use another layout."""
        return node in self.columns and operand not in self.columns

    def _keeps_shape(self, node: int) -> bool:
        """Whether a node is an identity; a reorder of a product's dimensions is not."""
        is_identity = self.program.opcodes[node] in IDENTITIES and node not in self.program.marks
        return is_identity and not self.is_relayout[node]

    def _repeats(self, user: int, node: int) -> bool:
        program = self.program
        return program.opcodes[user] in _REPEATING and program.elements[user] != program.elements[node]

    def _kernels(self) -> Kernels:
        program = self.program
        is_view = [opcode in TUPLE_VIEWS for opcode in program.opcodes]
        reads: list[dict[int, bool]] = []
        for node, operands in enumerate(program.operands):
            aligned = program.opcodes[node] in ELEMENTWISE or self._keeps_shape(node)
            sources: dict[int, bool] = {}
            for operand in operands:
                is_inside = self.is_taken_in[operand] and self._can_fuse(node, operand)
                if is_inside or not self.is_stored[operand]:
                    sources = _merge_reads(sources, reads[operand])
                else:
                    sources = _merge_reads(sources, {operand: True})
            reads.append(sources if aligned else dict.fromkeys(sources, False))
            if program.opcodes[node] in IDENTITIES and tuple(sources) == operands and not self.is_relayout[node]:
                is_view[node] = True
        is_library = [home != OUTSIDE for home in self.library]
        return Kernels(is_stored=self.is_stored, is_view=is_view, is_library=is_library, reads=reads)


def _merge_reads(some: dict[int, bool], others: dict[int, bool]) -> dict[int, bool]:
    """Reads of two parts of a kernel: the larger is copied, or returned if the other is empty."""
    if not some or not others:
        return some or others
    if len(some) < len(others):
        some, others = others, some
    joined = dict(some)
    for source, is_aligned in others.items():
        joined[source] = is_aligned and joined.get(source, True)
    return joined
