"""Tile padding on XLA:TPU: tiles of 8 by 128 elements, along the two innermost dimensions.

A reshape of the innermost dimension copies, from one layout to another. Group normalization splits features this way,
and its values have that copy's layout until they are joined. Among the groups of dimensions that the reshape maps to
one another, the innermost one has the least tile padding in both arrays; on ties, the last. (Observed: libtpu 0.0.42.1,
the ten layouts of tests/cost/peak/test_tile_padding.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod

from shardwright.cost.opcodes import PRODUCTS
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.hlo import Instruction

#: Elements of a tile along the innermost dimension, and along the next one.
_LANES, _SUBLANES = 128, 8

#: Opcodes that choose the layout of their operands and results.
_LAYING_OUT = PRODUCTS | {"transpose"}

Lengths = tuple[int, ...]


def is_relayout(instruction: Instruction, opcode: str) -> bool:
    """Whether a reshape changes the innermost dimension: in tiled memory, no view."""
    if opcode != "reshape" or instruction.opcode != "reshape":
        return False
    shapes = (instruction.shape.leaves[0].dimensions, instruction.operands[0].shape.leaves[0].dimensions)
    before, after = (next((size for size in reversed(shape) if size > 1), 1) for shape in shapes)
    return before != after


def fill_tiles(program: DeviceProgram, lengths_of: Callable[[Instruction], Lengths]) -> None:
    """Pad to full tiles the values between reshapes of the innermost dimension.

    lengths_of: the dimensions of one device's part of an instruction's only array.
    """
    lengths = [_lengths(program, node, lengths_of) for node in range(len(program.opcodes))]
    filled: dict[Lengths, float] = {}
    for node, opcode in enumerate(program.opcodes):
        if is_relayout(program.instructions[node], opcode):
            after, before = lengths[node], lengths[program.operands[node][0]]
            if after and before:
                narrow, wide = sorted((after, before), key=lambda layout: layout[-1])
                filled[narrow] = padding_factor(narrow, wide)
    for node, opcode in enumerate(program.opcodes):
        if opcode in _LAYING_OUT:
            for end in (node, *program.operands[node]):
                filled.pop(lengths[end], None)
    for node, dims in enumerate(lengths):
        if dims in filled and program.opcodes[node] != "parameter":
            (size,) = program.sizes_bytes[node]
            program.sizes_bytes[node] = (round(size * filled[dims]),)


def _lengths(program: DeviceProgram, node: int, lengths_of: Callable[[Instruction], Lengths]) -> Lengths:
    """Dimensions longer than one of a node's only array; empty on other nodes and on parts of arrays."""
    instruction = program.instructions[node]
    if len(program.sizes_bytes[node]) != 1 or len(instruction.shape.leaves) != 1:
        return ()
    lengths = lengths_of(instruction)
    return tuple(size for size in lengths if size > 1) if prod(lengths) == program.elements[node] else ()


def padding_factor(narrow: Lengths, wide: Lengths) -> float:
    """Padded bytes / own bytes of an array reshaped to, or from, one of wider rows."""
    best, inner, second = float("inf"), 1, 1
    for own, other, last in _groups(narrow, wide):
        needed = max(_dim_padding_factor(own[-1], _LANES), _dim_padding_factor(other[-1], _LANES))
        if needed <= best:
            best, inner, second = needed, own[-1], last
    return _dim_padding_factor(inner, _LANES) * _dim_padding_factor(second, _SUBLANES)


def _groups(narrow: Lengths, wide: Lengths) -> Iterator[tuple[Lengths, Lengths, int]]:
    """Matching dimension groups of two arrays (equal elements), in order; and the narrow array's neighbor of the
    group's last dimension, with that dimension innermost.
    """
    ends = [(0, 0), *_ends(narrow, wide)]
    for (i, j), (own_end, other_end) in pairwise(ends):
        own, rest = narrow[i:own_end], (*narrow[:i], *narrow[own_end:])
        yield own, wide[j:other_end], (own[:-1] or rest or (1,))[-1]


def _ends(some: Sequence[int], others: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ends of groups of dimensions with equal numbers of elements in two arrays."""
    i = j = 0
    own = other = 1
    while i < len(some) or j < len(others):
        if own <= other and i < len(some):
            own, i = own * some[i], i + 1
        else:
            other, j = other * others[j], j + 1
        if own == other:
            yield i, j
            own = other = 1


def _dim_padding_factor(length: int, tile: int) -> float:
    """Padded length of a dimension in tiles / its own length."""
    return -(-length // tile) * tile / length
