"""Which values of a program are stored, and which live only inside the kernels that read them.

After XLA's InstructionFusion (xla/service/instruction_fusion.cc, cpu_instruction_fusion.cc), decided per value
instead of per kernel: a value that costs little to compute again goes into every kernel that
can take it in; one that reads several large operands only if all its readers can; an expensive one only
if a single kernel reads it, and reads no element twice. Left out: XLA's limit on code duplication.
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

#: What a logistic function and a softmax are made of.
_QUOTIENTS = frozenset({"divide", "exponential", "logistic"})

#: A concatenation along the last dimension is a kernel of its own from this size.
_SMALL_CONCATENATION_BYTES = 2048

_MANY = -1


@dataclass(slots=True, kw_only=True)
class Kernels:
    """What fusion leaves of a program.

    is_kept: nodes that are kernels of their own or views of what a kernel stored.
    is_view: those whose value is (part of) what they read.
    reads: per kept node, the kept nodes it reads; True where each element of the result
        only needs the element at the same place, so that it may be written over.
    is_library: nodes whose kernel is a library's that computes more than they: it writes over nothing.
    """

    is_stored: list[bool]
    is_view: list[bool]
    is_library: list[bool]
    reads: list[dict[int, bool]]


def fuse(program: DeviceProgram, compiler: Compiler) -> Kernels:
    """Decide what `compiler` stores of a program."""
    return _Fusion(program, compiler).run()


class _Fusion:
    def __init__(self, program: DeviceProgram, compiler: Compiler) -> None:
        self.program = program
        self.compiler = compiler
        self.users = program.users()
        self.columns = find_gather_layouts(program) if compiler.copies_gathered else frozenset[int]()
        self.loops = LOOPS | {"reduce"} if compiler.reduce_takes_in == "loops" else LOOPS
        count = len(program.opcodes)
        self.is_stored = [True] * count
        self.is_taken_in = [False] * count  # by every reader that can
        self.home = list(range(count))  # the one kernel that computes it, or _MANY
        self.is_repeated = [False] * count  # whether its kernel reads elements of it more than once
        # Kernels that take in whatever loops compute; what has been taken in by a reduction that does not is closed.
        self.library = library_kernels(program) if compiler.reduce_takes_in == "library" else [OUTSIDE] * count
        self.is_open = [
            opcode in self.loops and not self._is_copying(node) and self.library[node] == OUTSIDE
            for node, opcode in enumerate(program.opcodes)
        ]
        self.is_relayout = [
            compiler.copies_relayouts
            and (is_relayout(program.instructions[node], opcode) or program.marks.get(node) == TRANSPOSED)
            for node, opcode in enumerate(program.opcodes)
        ]
        # What a kernel of a convolution computes.
        self.is_convolved = [compiler.products_take_in and opcode == "convolution" for opcode in program.opcodes]
        self.is_open = [each and not other for each, other in zip(self.is_open, self.is_relayout, strict=True)]
        self.is_loop = list(self.is_open)
        self.joined: dict[int, int] = {}  # kernels that are part of another one, which has several results
        self.is_last = self._are_last()
        self.has_product = [opcode in PRODUCTS for opcode in program.opcodes]
        if compiler.products_take_in:
            self.is_open = [each or product for each, product in zip(self.is_open, self.has_product, strict=True)]

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
        if self.compiler.products_take_in and self.program.opcodes[node] in PRODUCTS:
            self._decide_product(node)
            return
        if not self.is_loop[node]:
            return
        takers = [user for user in users if self._can_fuse(user, node)]
        if not takers:
            return
        if self.compiler.products_take_in and self._is_rounded_product(node):
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
            fused = self.compiler.repeats_cheap and self._is_cheap_to_repeat(node) and not self._ends_product(node)
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
        """Whether several kernels would compute a node, and one of a convolution, for each of its window's places."""
        users = self.users[node]
        homes = {self._only_kernel(user) for user in users}
        return (len(homes) > 1 or _MANY in homes) and any(self.is_convolved[user] for user in users)

    def _ends_product(self, node: int) -> bool:
        """Whether a node is what a product's kernel computes last, which then is what others read."""
        opcodes, operands = self.program.opcodes, self.program.operands[node]
        return self.compiler.products_take_in and any(
            opcodes[operand] in PRODUCTS and self.users[operand] == [node] for operand in operands
        )

    def _only_kernel(self, node: int) -> int:
        """The kernel that alone computes a node, or _MANY."""
        home = self.home[node]
        while home in self.joined:
            home = self.joined[home]
        return home

    def _one_of(self, homes: set[int]) -> int:
        """The kernel that alone computes what these read: where all are the last of the program, and of one size, as a
        variable's and its moments' updates are, they are one kernel of several results."""
        if len(homes) == 1:
            return homes.pop()
        sizes = {self.program.elements[home] for home in homes}
        if _MANY in homes or len(sizes) > 1 or not all(self.is_last[home] for home in homes):
            return _MANY
        first, *others = sorted(homes)
        self.joined |= dict.fromkeys(others, first)
        self.has_product[first] |= any(self.has_product[each] for each in others)
        return first

    def _are_last(self) -> list[bool]:
        """Whether all that reads a node is elementwise, up to the program's results: nothing waits for it."""
        program = self.program
        last = [False] * len(program.opcodes)
        if self.compiler.products_take_in:
            for node in range(len(last) - 1, -1, -1):
                if program.opcodes[node] in ELEMENTWISE | IDENTITIES:
                    last[node] = all(user == program.root or last[user] for user in self.users[node])
        return last

    def _decide_product(self, node: int) -> None:
        """A product is part of the kernel of the elementwise instructions that read it: one in each kernel."""
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
        """Whether a node is read by products alone, as bfloat16, and made elementwise of another one: that one's kernel
        stores it, unless its readers compute it again of what is stored for others."""
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
            return bool(products)  # a copy computes nothing: the value is stored for it beside what it is made of
        return any(inside.issuperset(self.users[product]) for product in products)

    def _can_fuse(self, user: int, node: int) -> bool:
        """Whether the kernel of `user` can compute `node`."""
        if self.library[user] != OUTSIDE:  # as decided before layouts matter
            return self.library[node] == self.library[user]
        if self.is_open[user]:
            return self.is_loop[node] and not self._is_cut_for_product(user)
        if self.program.opcodes[user] == "reduce":
            return self.program.opcodes[node] in ELEMENTWISE and len(self.users[node]) == 1
        return False

    def _is_cut_for_product(self, node: int) -> bool:
        """Whether a node is the part of an array that a product's kernel reads: it computes no more than it reads."""
        if not self.compiler.products_take_in or self.program.opcodes[node] != "dynamic-slice":
            return False
        return all(self.has_product[self._only_kernel(user)] for user in self.users[node])

    def _is_copying(self, node: int) -> bool:
        """Concatenations along the last dimension move whole pieces."""
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
        if self.compiler.repeats_expensive and opcode in ELEMENTWISE:
            return False
        if self.compiler.repeats_quotients and opcode in _QUOTIENTS:
            return False
        if opcode in ("divide", "remainder"):
            return not self._is_constant(self.program.operands[node][1])
        if opcode == "convert":
            return self._is_rounding_to_bf16(node)
        return opcode in EXPENSIVE

    def _is_rounding_to_bf16(self, node: int) -> bool:
        """From two bytes an element more: f32 to bf16 needs tests for NaN, all other conversions are simple."""
        program = self.program
        (size,), (before,) = program.sizes_bytes[node], program.sizes_bytes[program.operands[node][0]]
        return size == 2 * program.elements[node] and before == 2 * size

    def _is_constant(self, node: int) -> bool:
        while self.program.opcodes[node] in ("broadcast", "convert"):
            (node,) = self.program.operands[node]
        return self.program.opcodes[node] == "constant"

    def _is_cheap_to_repeat(self, node: int) -> bool:
        """Whether repeating it reads no more than reading its result."""
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
        """Whether a node reads a copy of what others read in another layout."""
        return node in self.columns and operand not in self.columns

    def _keeps_shape(self, node: int) -> bool:
        """Whether a node is an identity, other than one that brings a product's dimensions into another order."""
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
            found: dict[int, bool] = {}
            for operand in operands:
                if self.is_taken_in[operand] and self._can_fuse(node, operand):
                    found = _merge_reads(found, reads[operand])
                else:
                    found = _merge_reads(found, {operand: True})
            reads.append(found if aligned else dict.fromkeys(found, False))
            if program.opcodes[node] in IDENTITIES and tuple(found) == operands and not self.is_relayout[node]:
                is_view[node] = True
        is_library = [home != OUTSIDE for home in self.library]
        return Kernels(is_stored=self.is_stored, is_view=is_view, is_library=is_library, reads=reads)


def _merge_reads(some: dict[int, bool], others: dict[int, bool]) -> dict[int, bool]:
    """What two parts of a kernel read; the larger is copied, or handed on where the other is empty."""
    if not some or not others:
        return some or others
    if len(some) < len(others):
        some, others = others, some
    joined = dict(some)
    for source, is_aligned in others.items():
        joined[source] = is_aligned and joined.get(source, True)
    return joined
