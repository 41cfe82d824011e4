"""What XLA:TPU fills up: its arrays lie in tiles of 8 by 128 elements, along the two dimensions that it puts innermost.

A reshape of the innermost dimension copies, from one layout to another. Group normalisation takes features apart so,
and all that it computes until they are put together lies as that copy does. Of the groups of dimensions that the
reshape takes for one another, that one is put innermost which needs least to fill up the tiles of both arrays; of
several, the last. (Observed: libtpu 0.0.42.1, the ten layouts of tests/cost/peak/test_tile_padding.py.)
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

#: What lays its operands and results out as it needs them.
_LAYING_OUT = PRODUCTS | {"transpose"}

Lengths = tuple[int, ...]


def is_relayout(instruction: Instruction, opcode: str) -> bool:
    """Whether a reshape has another innermost dimension than its operand, which tiled memory cannot show as a view."""
    if opcode != "reshape" or instruction.opcode != "reshape":
        return False
    shapes = (instruction.shape.leaves[0].dimensions, instruction.operands[0].shape.leaves[0].dimensions)
    before, after = (next((size for size in reversed(shape) if size > 1), 1) for shape in shapes)
    return before != after


def fill_tiles(program: DeviceProgram, lengths_of: Callable[[Instruction], Lengths]) -> None:
    """Store what lies between reshapes of the innermost dimension with what fills up its tiles.

    lengths_of: the dimensions of one device's part of an instruction's only array.
    """
    lengths = [_lengths(program, node, lengths_of) for node in range(len(program.opcodes))]
    filled: dict[Lengths, float] = {}
    for node, opcode in enumerate(program.opcodes):
        if is_relayout(program.instructions[node], opcode):
            after, before = lengths[node], lengths[program.operands[node][0]]
            if after and before:
                narrow, wide = sorted((after, before), key=lambda each: each[-1])
                filled[narrow] = padding_factor(narrow, wide)
    for node, opcode in enumerate(program.opcodes):
        if opcode in _LAYING_OUT:
            for each in (node, *program.operands[node]):
                filled.pop(lengths[each], None)
    for node, dims in enumerate(lengths):
        if dims in filled and program.opcodes[node] != "parameter":
            (size,) = program.sizes_bytes[node]
            program.sizes_bytes[node] = (round(size * filled[dims]),)


def _lengths(program: DeviceProgram, node: int, lengths_of: Callable[[Instruction], Lengths]) -> Lengths:
    """Dimensions longer than one of a node's only array; none for what is no such array, or a part of it."""
    instruction = program.instructions[node]
    if len(program.sizes_bytes[node]) != 1 or len(instruction.shape.leaves) != 1:
        return ()
    lengths = lengths_of(instruction)
    return tuple(size for size in lengths if size > 1) if prod(lengths) == program.elements[node] else ()


def padding_factor(narrow: Lengths, wide: Lengths) -> float:
    """How many times its own bytes an array takes that a reshape makes of, or takes for, one of wider rows."""
    best, inner, second = float("inf"), 1, 1
    for own, other, last in _groups(narrow, wide):
        needed = max(_dim_padding_factor(own[-1], _LANES), _dim_padding_factor(other[-1], _LANES))
        if needed <= best:
            best, inner, second = needed, own[-1], last
    return _dim_padding_factor(inner, _LANES) * _dim_padding_factor(second, _SUBLANES)


def _groups(narrow: Lengths, wide: Lengths) -> Iterator[tuple[Lengths, Lengths, int]]:
    """Dimensions of two arrays that are the same elements, in order; and the one of the narrow array that lies next to
    the last of the group, if that is innermost."""
    ends = [(0, 0), *_ends(narrow, wide)]
    for (i, j), (own_end, other_end) in pairwise(ends):
        own, rest = narrow[i:own_end], (*narrow[:i], *narrow[own_end:])
        yield own, wide[j:other_end], (own[:-1] or rest or (1,))[-1]


def _ends(some: Sequence[int], others: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where groups of dimensions of as many elements end in two arrays."""
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
    """What a dimension takes in tiles, as a multiple of its own length."""
    return -(-length // tile) * tile / length
