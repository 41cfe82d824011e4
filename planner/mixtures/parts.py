"""The parts of a mixture of experts by ragged products: what its instructions do to its rows.

In each computation, from the ragged products outward:

    experts    the products, and what works row by row between two of them;
    dispatch   ahead of them: what makes rows of tokens, up to values of fewer elements, and the integers that say which
               row goes where, back to the router's choice (top-k) and its sort;
    combine    behind them: up to tokens again, by a scatter, a sum or a product over the experts of a token, with its
               weights, and integers of its own.

Backward passes have the same shape, the gradients of tokens being what is sent. Rewrites name what they write in the
place of an instruction after it, so that parts are found again in the program that is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardwright.hlo import Computation, Instruction, Module

RAGGED_PRODUCT = "ragged-dot"

#: Operands of a gather and of a scatter that say where rows are.
_PLACES = {"gather": 1, "scatter": 1}
#: What moves rows: its first operand, or of a scatter its updates, are elements like its result's.
_MOVES = frozenset({"gather", "scatter", "sort"})
#: What sums rows to tokens.
_SUMS = frozenset({"reduce", "dot", "scatter", "reduce-window"})
#: Never a part of a mixture: values from elsewhere.
_OUTSIDE = frozenset({"parameter", "get-tuple-element", "while", "conditional", "call", "constant", "custom-call"})
#: The end of what the router does, of the integers' side.
_CHOICE = frozenset({"sort", "topk"})
_INTEGERS = frozenset({"pred", *(f"{sign}{bits}" for sign in "su" for bits in (4, 8, 16, 32, 64))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of a module. by_name: its instructions' parts. names: of all its instructions. mixtures: of those that are
    no second computation, by the name of a product of each, the rows that it multiplies.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    mixtures: Mapping[str, int] = field(default_factory=dict)

    def part_of(self, name: str) -> str:
        """The part of an instruction, or of what was written in the place of one; empty: of none."""
        return self.by_name.get(self.origin(name), "")

    def origin(self, name: str) -> str:
        """The instruction that one was written for; itself, if it stood in the module."""
        while name not in self.names and "." in name:
            name = name.rpartition(".")[0]
        return name


def find_parts(module: Module) -> Parts:
    """The parts of a module's mixtures; none without ragged products."""
    by_name: dict[str, str] = {}
    mixtures: list[list[Instruction]] = []
    for computation in module.computations:
        products = [i for i in computation.instructions if i.opcode == RAGGED_PRODUCT]
        if products:
            by_name |= _Finder(computation, products).find()
            mixtures += _group(products)
    if not mixtures:
        return Parts()
    names = frozenset(instruction.name for instruction in module.instructions())
    return Parts(by_name=by_name, names=names, mixtures=dict(_count(mixtures)))


def _group(products: Iterable[Instruction]) -> list[list[Instruction]]:
    """Products with the same sizes of groups are of one mixture."""
    mixtures: dict[Instruction, list[Instruction]] = {}
    for product in products:
        mixtures.setdefault(product.operands[2], []).append(product)
    return list(mixtures.values())


def _count(mixtures: Sequence[Sequence[Instruction]]) -> Iterator[tuple[str, int]]:
    """(a product, its rows) of mixtures, without those that a backward pass computes again, with gradients of matrices,
    where there are others of their size.
    """

    def size(products: Sequence[Instruction]) -> tuple[int, int]:
        return _rows_of(products[0]), products[0].operands[2].shape.leaves[0].dimensions[-1]

    def has_gradients(products: Sequence[Instruction]) -> bool:
        return any(not product.get("rhs_group_dims") for product in products)

    forward = {size(products) for products in mixtures if not has_gradients(products)}
    for products in mixtures:
        if not has_gradients(products) or size(products) not in forward:
            yield products[0].name, _rows_of(products[0])


def _rows_of(product: Instruction) -> int:
    ragged = product.get("lhs_ragged_dims")[0]
    return int(product.operands[0].shape.leaves[0].dimensions[ragged])


class _Finder:
    """Of one computation."""

    def __init__(self, computation: Computation, products: list[Instruction]) -> None:
        self._products = products
        self._rows = {_rows_of(product) for product in products}
        self._readers: dict[Instruction, list[Instruction]] = {}
        for instruction in computation.instructions:
            for operand in instruction.operands:
                self._readers.setdefault(operand, []).append(instruction)

    def find(self) -> dict[str, str]:
        products = set(self._products)
        behind = self._reach(products, lambda i: self._readers.get(i, []), self._is_by_row)
        ahead = self._reach(products, self._row_operands, self._is_by_row)
        experts = products | (behind & ahead)
        combine = self._to_tokens((behind - ahead) | experts, experts)
        dispatch = self._from_tokens((ahead - behind) | experts, experts)
        combine |= self._reach(combine, lambda i: i.operands, self._is_number_by_row) - dispatch - experts
        integers = [product.operands[2] for product in self._products]
        integers += [each.operands[_PLACES[each.opcode]] for each in dispatch if each.opcode in _PLACES]
        dispatch |= self._integers(integers)
        combine |= self._integers(each.operands[_PLACES[each.opcode]] for each in combine if each.opcode in _PLACES)
        parts = {each.name: "combine" for each in combine}
        parts |= {each.name: "dispatch" for each in dispatch}
        return parts | {each.name: "experts" for each in experts}

    # ---- rows ------------------------------------------------------------------------
    def _is_by_row(self, instruction: Instruction) -> bool:
        """Whether it computes rows of rows; a constant's are nobody's."""
        if _is_splat(instruction):
            return False
        if instruction.opcode in _OUTSIDE or instruction.opcode in _MOVES or instruction.opcode in _SUMS:
            return False
        return any(leaf.dimensions and leaf.dimensions[0] in self._rows for leaf in instruction.shape.leaves)

    def _is_number_by_row(self, instruction: Instruction) -> bool:
        """Whether it makes a weight for each row, or spreads them along the rows."""
        if not _is_real(instruction) or instruction.opcode in _OUTSIDE | _SUMS or _is_splat(instruction):
            return False
        return _elements(instruction.operands[0] if instruction.opcode == "broadcast" else instruction) in self._rows

    def _row_operands(self, instruction: Instruction) -> list[Instruction]:
        """What gives an instruction its rows: of a product all but matrices and sizes."""
        if instruction.opcode != RAGGED_PRODUCT:
            return list(instruction.operands)
        has_matrices = bool(instruction.get("rhs_group_dims"))
        return [instruction.operands[0], *([] if has_matrices else [instruction.operands[1]])]

    def _reach(
        self,
        start: Iterable[Instruction],
        following: Callable[[Instruction], Iterable[Instruction]],
        is_inside: Callable[[Instruction], bool],
    ) -> set[Instruction]:
        """All that follows, as far as it is inside."""
        reached: set[Instruction] = set()
        todo = list(start)
        while todo:
            for instruction in following(todo.pop()):
                if instruction not in reached and is_inside(instruction):
                    reached.add(instruction)
                    todo.append(instruction)
        return reached

    def _to_tokens(self, rows: set[Instruction], experts: set[Instruction]) -> set[Instruction]:
        """What is behind the products: as long as the values are as large as the rows, and what makes them tokens."""
        found = rows - experts
        sizes = {_elements(product) for product in self._products if product.get("rhs_group_dims")}
        todo = list(rows)
        while todo:
            for reader in self._readers.get(todo.pop(), []):
                if reader in found or reader in experts or not _is_real(reader) or reader.opcode in _OUTSIDE:
                    continue
                if _elements(reader) in sizes:
                    todo.append(reader)
                elif reader.opcode not in _SUMS or _elements(reader) > max(sizes, default=0):
                    continue
                found.add(reader)
        return found

    def _from_tokens(self, rows: set[Instruction], experts: set[Instruction]) -> set[Instruction]:
        """What is ahead of the products: as long as the values are as large as the rows."""
        found = rows - experts
        sizes = {_elements(product.operands[0]) for product in self._products}
        sizes |= {_elements(product.operands[1]) for product in self._products if not product.get("rhs_group_dims")}
        todo = list(rows)
        while todo:
            instruction = todo.pop()
            for operand in self._row_operands(instruction):
                if operand in found or operand in experts or not _is_real(operand) or operand.opcode in _OUTSIDE:
                    continue
                if _is_splat(operand):
                    continue
                if _elements(operand) in sizes:
                    found.add(operand)
                    todo.append(operand)
        return found

    # ---- integers ----------------------------------------------------------------------
    def _integers(self, start: Iterable[Instruction]) -> set[Instruction]:
        """What computes these integers, back to a sort or a choice of the largest."""
        found: set[Instruction] = set()
        todo = list(start)
        while todo:
            instruction = todo.pop()
            if instruction in found:
                continue
            if instruction.opcode == "get-tuple-element":
                todo.append(instruction.operands[0])
                continue
            is_choice = instruction.opcode in _CHOICE or instruction.get("custom_call_target") == "TopK"
            if is_choice or (instruction.opcode not in _OUTSIDE and not _is_real(instruction)):
                found.add(instruction)
                if not is_choice or all(map(_is_integer, instruction.operands)):
                    todo += instruction.operands
        return found


def _elements(instruction: Instruction) -> int:
    """Of the largest array of a result."""
    return max((prod(leaf.dimensions) for leaf in instruction.shape.leaves), default=0)


def _is_splat(instruction: Instruction) -> bool:
    """Whether all its elements are one number."""
    return instruction.opcode == "broadcast" and not instruction.operands[0].shape.leaves[0].dimensions


def _is_real(instruction: Instruction) -> bool:
    """Whether it makes numbers that are no integers."""
    return any(leaf.element_type not in _INTEGERS for leaf in instruction.shape.leaves)


def _is_integer(instruction: Instruction) -> bool:
    return not _is_real(instruction)
