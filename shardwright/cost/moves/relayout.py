"""Memory cost of reshards besides communication: kernels that reorder elements.

A collective splits or joins an array piece after piece in memory. With pieces cut along an inner dimension, XLA:GPU's
layout assignment makes that dimension outermost in the collective's operand and result. The transpose costs:

- nothing in a loop that produces or reads it (elementwise kernels write and read in any order);
- nothing in a matrix product with that dimension alone on its side (a matrix is row- or column-major);
- otherwise a transposing kernel, with one read and one write of the whole array.

A reduction of rows gathered along them costs the same: it no longer fuses with the readers of its results.

Combined all-reduces of gradients (AllReduceCombiner, then AllReduceContiguous): one kernel copies the operands side by
side, and one each copies the result out.

Checked against XLA:GPU programs compiled for A100s by `oracles/gpu_moves.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright.cost.moves.partitioner import OutermostDim
from shardwright.cost.moves.tilings import AtomOrder, count
from shardwright.cost.opcodes import LOOPS
from shardwright.cost.profiles import HardwareProfile
from shardwright.hlo import Instruction

#: Orders of elements accepted by an end of a move: any; any with whole rows adjacent (rows are reduced and read
#: again); row- or column-major; one only.
LOOP, ROWS, PRODUCT, STORED = range(4)

#: Opcodes that write and read arrays in any order, within their kernel.
_IN_ANY_ORDER = LOOPS | {"reduce", "reduce-window"}

#: Collectives that leave elements where they are.
_ELEMENTWISE = frozenset({"all-reduce", "collective-permute"})

#: Maximum bytes of combined all-reduces: XLA's `kDefaultAllReduceCombineThreshold`.
_MIN_JOINED_BYTES = 30 << 20

#: Kinds of collectives with a result in any order: reductions of partial sums come first, or alone.
_SUMS = frozenset({"all-reduce", "reduce-scatter"})


class MoveEnds(NamedTuple):
    """Producer and reader of the moved array, each LOOP, ROWS, PRODUCT or STORED.

    is_fused: whether both would form one kernel without the move, now separated by a write and a read. waits: whether
        the step waits on the move, which runs alone: no gradient.
    """

    maker: int
    reader: int
    is_fused: bool = False
    waits: bool = True


#: Ends of moves that need no kernel.
ANY_ORDER = MoveEnds(LOOP, LOOP)


class CollectiveAccess(NamedTuple):
    """One collective: bytes read and written on one device, and the outermost dimension of both."""

    kind: str
    read_bytes: float
    written_bytes: float
    reads: OutermostDim | None
    writes: OutermostDim | None


def access_of(
    kind: str, payload_bytes: float, atoms: AtomOrder, reads: OutermostDim | None, writes: OutermostDim | None
) -> CollectiveAccess:
    """Memory access of a collective, with the arguments of `collectives.wire_bytes`."""
    read_bytes = payload_bytes / count(atoms) if kind == "all-gather" else payload_bytes
    return CollectiveAccess(kind, read_bytes, payload_bytes, reads, writes)


def relayout_s(
    moves: Sequence[CollectiveAccess], shape: tuple[int, ...], ends: MoveEnds, profile: HardwareProfile
) -> float:
    """Seconds of the transposing kernels around the collectives of one reshard.

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
    """Bytes of the arrays transposed before, between and behind collectives.

    An array stored at both ends is gathered in its own layout, and reordered afterwards.
    """
    outermost: OutermostDim | None = None  # in the previous collective's result
    before = ""
    for move in moves:
        reads = _drop_unit_dims(move.reads, shape)
        if not before:
            is_turned = not _accepts(ends.maker, reads) and (ends.maker, ends.reader) != (STORED, STORED)
        else:
            is_turned = before not in _SUMS and _place_of_dim(outermost) != _place_of_dim(reads)
        if is_turned and move.kind not in _ELEMENTWISE:
            yield move.read_bytes
        if move.kind not in _ELEMENTWISE:
            outermost = _drop_unit_dims(move.writes, shape)
        before = move.kind
    if moves and not _accepts(ends.reader, outermost):
        yield moves[-1].written_bytes


def _drop_unit_dims(outermost: OutermostDim | None, shape: tuple[int, ...]) -> OutermostDim | None:
    """None if all dimensions before it have one element: the outermost one is already in order."""
    if outermost is None or all(-(-size // parts) == 1 for size, parts in zip(shape, outermost.cut, strict=False)):
        return None
    return outermost


def _place_of_dim(outermost: OutermostDim | None) -> int:
    return 0 if outermost is None else len(outermost.cut)


def _accepts(end: int, outermost: OutermostDim | None) -> bool:
    """Whether an end of a move produces or reads this layout in its own kernel."""
    return outermost is None or end == LOOP or end == (PRODUCT if outermost.is_last else ROWS)


# ---- ends ------------------------------------------------------------------------


def maker_of(instruction: Instruction) -> int:
    """An instruction's handling of its result's dimension order."""
    if instruction.opcode == "dot":
        rhs = instruction.operands[1].shape.leaves[0].rank
        bound = (*instruction.get("rhs_contracting_dims", ()), *instruction.get("rhs_batch_dims", ()))
        is_matrix = not instruction.get("rhs_batch_dims", ()) and rhs - len(bound) == 1
        return PRODUCT if is_matrix else STORED
    return LOOP if instruction.opcode in _IN_ANY_ORDER else STORED


def reader_of(instruction: Instruction, position: int) -> int:
    """An instruction's handling of an operand's dimension order."""
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
