"""What moves cost in memory, besides what they send: kernels that bring elements into another order.

A collective takes an array apart, or puts it together, piece after piece in memory. Where the pieces are cut along
an inner dimension, XLA:GPU's layout assignment has that dimension lie outermost in what the collective reads and
writes, and somebody has to turn the array around: for nothing where a loop makes or reads it (what is elementwise
writes and reads in any order); for nothing in a matrix product whose dimension it is alone (a matrix lies by rows or
by columns); else by a kernel that transposes, which reads and writes all of it once. As much takes a reduction of rows
that were gathered along them, for it is no longer one kernel with what reads its results.

All-reduces of gradients run together (AllReduceCombiner, then AllReduceContiguous): one kernel copies what they reduce
side by side, and one each copies it out again.

Checked against programs that XLA:GPU compiles for A100s by `benchmarks/probe_gpu_moves.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.cost.moves.partitioner import OutermostDim
from shardwright.cost.moves.tilings import AtomOrder, count
from shardwright.cost.opcodes import LOOPS
from shardwright.cost.profiles import HardwareProfile
from shardwright.hlo import Instruction

#: What an end of a move does about the order of elements: takes any; any in which rows are read at once, as it reduces
#: them and reads them again; rows or columns; one only.
LOOP, ROWS, PRODUCT, STORED = range(4)

#: Opcodes that make and read arrays in any order, in the kernel that they are part of anyway.
_IN_ANY_ORDER = LOOPS | {"reduce", "reduce-window"}

#: Collectives that leave elements where they are.
_ELEMENTWISE = frozenset({"all-reduce", "collective-permute"})

#: All-reduces of up to so many bytes are joined with others: XLA's `kDefaultAllReduceCombineThreshold`.
_MIN_JOINED_BYTES = 30 << 20

#: Kinds of collectives whose result is read in any order: what adds up partial sums comes first, or alone.
_SUMS = frozenset({"all-reduce", "reduce-scatter"})


class MoveEnds(NamedTuple):
    """What makes the array that is moved, and what reads it then: LOOP, ROWS, PRODUCT or STORED.

    is_fused: whether both are part of one kernel, but for the move: it writes the array, and reads it. waits: whether
    the step waits for the move before it goes on, so that it runs alone: no gradient.
    """

    maker: int
    reader: int
    is_fused: bool = False
    waits: bool = True


#: The ends of moves of which no kernel is needed.
ANY_ORDER = MoveEnds(LOOP, LOOP)


class CollectiveAccess(NamedTuple):
    """One collective: bytes that it reads and writes on one device, and what lies outermost in both."""

    kind: str
    read_bytes: float
    written_bytes: float
    reads: OutermostDim | None
    writes: OutermostDim | None


def access_of(
    kind: str, payload_bytes: float, atoms: AtomOrder, reads: OutermostDim | None, writes: OutermostDim | None
) -> CollectiveAccess:
    """A collective as `collectives.wire_bytes` takes it."""
    read_bytes = payload_bytes / count(atoms) if kind == "all-gather" else payload_bytes
    return CollectiveAccess(kind, read_bytes, payload_bytes, reads, writes)


def relayout_s(
    moves: Sequence[CollectiveAccess], shape: tuple[int, ...], ends: MoveEnds, profile: HardwareProfile
) -> float:
    """Seconds of the kernels that turn around what the collectives of one resharding read and write.

    shape: logical dimensions in elements.
    """
    bandwidth = profile.memory_bandwidth_bytes_per_s
    turned_s = sum(max(2 * size / bandwidth, profile.launch_s) for size in transpose_bytes(moves, shape, ends))
    joined = [move.read_bytes for move in moves if not ends.waits and move.kind == "all-reduce"]
    joined_s = sum(
        2 * size / bandwidth + max(2 * size / bandwidth, profile.launch_s)
        for size in joined
        if size <= _MIN_JOINED_BYTES
    )
    return turned_s + joined_s


def transpose_bytes(moves: Sequence[CollectiveAccess], shape: tuple[int, ...], ends: MoveEnds) -> Iterator[float]:
    """Sizes of the arrays that are transposed before, between and behind collectives.

    What is stored and will be stored is gathered as it lies, and put in order then.
    """
    lies: OutermostDim | None = None  # in what the collective before wrote
    before = ""
    for move in moves:
        reads = _drop_unit_dims(move.reads, shape)
        if not before:
            is_turned = not _accepts(ends.maker, reads) and (ends.maker, ends.reader) != (STORED, STORED)
        else:
            is_turned = before not in _SUMS and _place_of_dim(lies) != _place_of_dim(reads)
        if is_turned and move.kind not in _ELEMENTWISE:
            yield move.read_bytes
        if move.kind not in _ELEMENTWISE:
            lies = _drop_unit_dims(move.writes, shape)
        before = move.kind
    if moves and not _accepts(ends.reader, lies):
        yield moves[-1].written_bytes


def _drop_unit_dims(outermost: OutermostDim | None, shape: tuple[int, ...]) -> OutermostDim | None:
    """None where the dimensions before it have one element: what is outermost then lies in order."""
    if outermost is None or all(-(-size // parts) == 1 for size, parts in zip(shape, outermost.cut, strict=False)):
        return None
    return outermost


def _place_of_dim(outermost: OutermostDim | None) -> int:
    return 0 if outermost is None else len(outermost.cut)


def _accepts(end: int, outermost: OutermostDim | None) -> bool:
    """Whether an end of a move makes or reads what lies so in its own kernel."""
    return outermost is None or end == LOOP or end == (PRODUCT if outermost.is_last else ROWS)


# ---- ends ------------------------------------------------------------------------


def maker_of(instruction: Instruction) -> int:
    """What an instruction does about the order of what it makes."""
    if instruction.opcode == "dot":
        rhs = instruction.operands[1].shape.leaves[0].rank
        bound = (*instruction.get("rhs_contracting_dims", ()), *instruction.get("rhs_batch_dims", ()))
        is_matrix = not instruction.get("rhs_batch_dims", ()) and rhs - len(bound) == 1
        return PRODUCT if is_matrix else STORED
    return LOOP if instruction.opcode in _IN_ANY_ORDER else STORED


def reader_of(instruction: Instruction, position: int) -> int:
    """What an instruction does about the order of an operand."""
    if instruction.opcode == "dot":
        side = ("lhs", "rhs")[position]
        contracted: tuple[int, ...] = instruction.get(f"{side}_contracting_dims", ())
        rank = instruction.operands[position].shape.leaves[0].rank
        is_alone = contracted == (rank - 1,) or (rank - 1 not in contracted and len(contracted) == rank - 1)
        return PRODUCT if is_alone and not instruction.get(f"{side}_batch_dims", ()) else STORED
    if instruction.opcode == "reduce":
        rank = instruction.operands[0].shape.leaves[0].rank
        return ROWS if rank - 1 in instruction.get("dimensions", ()) else LOOP
    return LOOP if instruction.opcode in _IN_ANY_ORDER else STORED
