"""Collectives between ranks, called eagerly or inside a jitted function.

Every rank of a set calls the same collectives in the same order. Values are numbers, numpy arrays, `jax.Array`s or
`torch.Tensor`s, or trees of them; results have the same kind, type and tree. A call that differs between ranks raises
CollectiveError at all of them; a rank that dies raises RankLostError at the others. 64-bit types stay what they are.

Traced values, of a function under `sw.ranks.jit` or in a `jax.shard_map` over the axis `rank`, become collectives of
the program (`in_jit`).

Common arguments: name: what errors call it, compared between ranks. process_set: the ranks that take part; None: all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from shardwright.errors import CollectiveError, OptionError
from shardwright.ranks import fusion, in_jit, job, messages, operations, programs, tensors, watch
from shardwright.ranks.agreement import Agreement, Follow, agree, capacity, describe, report_failure
from shardwright.ranks.compression import Cast
from shardwright.ranks.dispatch import Handle
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import ProcessSet
from shardwright.ranks.tensors import Tensor, TensorType, describe_type

_P = ParamSpec("_P")
_R = TypeVar("_R")

_EMPTY = np.zeros(0, np.uint8)


# ---- public ----------------------------------------------------------------------
def allreduce(
    value: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    *,
    name: str = "",
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Cast | None = None,
) -> Any:
    """The reduction of `value` over all ranks, at each. A tree goes as one message a type.

    op: `"average"`, `"sum"`, `"min"`, `"max"`, `"product"`, `"adasum"` (of each array by itself); `operations` has the
    types. An average is over the ranks that have data (`join`). prescale_factor, postscale_factor: of floats, before
    and after. compression: `Compression.fp16` or `bf16`, the type on the wire.
    """
    op = operations.to_op(op)
    leaves, paths, tree = _leaves(value)
    if in_jit.is_traced(leaves):
        reduced = in_jit.reduce_leaves(leaves, op, process_set, prescale_factor, postscale_factor, compression)
        return jax.tree.unflatten(tree, reduced)

    def task(members: ProcessSet) -> list[Any]:
        with report_to_all(members):
            inputs = _read_reducible(leaves, paths, op, prescale_factor, postscale_factor)
        reduction = _Reduction(op, prescale_factor, postscale_factor, compression)
        groups = [[tensor] for tensor in inputs] if op is ReduceOp.ADASUM else [inputs]
        return [result for group in groups for result in _reduce(members, group, reduction, name)]

    return jax.tree.unflatten(tree, run_on(process_set, task))


def allgather(value: Any, *, name: str = "", process_set: ProcessSet | None = None) -> Any:
    """The arrays of all ranks, one after the other along dimension 0, which may differ; scalars become a vector."""
    leaves, paths, tree = _leaves(value)
    if in_jit.is_traced(leaves):
        return jax.tree.unflatten(tree, in_jit.gather_leaves(leaves, process_set))

    def task(members: ProcessSet) -> list[Any]:
        with report_to_all(members):
            inputs = tensors.read_all(leaves, paths)
        return _gather(members, inputs, name)

    return jax.tree.unflatten(tree, run_on(process_set, task))


def broadcast(value: Any, root_rank: int = 0, *, name: str = "", process_set: ProcessSet | None = None) -> Any:
    """The value of rank `root_rank` (its number in the job), at every rank: every bit of any type.

    The others give a value of the same shapes and types.
    """
    leaves, paths, tree = _leaves(value)
    if in_jit.is_traced(leaves):
        return jax.tree.unflatten(tree, in_jit.broadcast_leaves(leaves, root_rank, process_set))

    def task(members: ProcessSet) -> list[Any]:
        with report_to_all(members):
            root = root_place(members, root_rank)
            inputs = tensors.read_all(leaves, paths)
        return _broadcast(members, inputs, root, name)

    return jax.tree.unflatten(tree, run_on(process_set, task))


def reducescatter(
    value: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    *,
    name: str = "",
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction. Of n rows on s ranks the first n % s ranks get one row more."""
    op = operations.to_op(op)
    leaves, paths, tree = _leaves(value)
    if in_jit.is_traced(leaves):
        scattered = in_jit.scatter_leaves(leaves, op, process_set, prescale_factor, postscale_factor)
        return jax.tree.unflatten(tree, scattered)

    def task(members: ProcessSet) -> list[Any]:
        with report_to_all(members):
            inputs = _read_reducible(leaves, paths, op, prescale_factor, postscale_factor)
            for tensor, path in zip(inputs, paths, strict=True):
                if not tensor.shape:
                    raise CollectiveError("a scalar has no rows to scatter", where=path, remedy="call allreduce")
        reduction = _Reduction(op, prescale_factor, postscale_factor, None)
        return _reduce_scatter(members, inputs, reduction, name)

    return jax.tree.unflatten(tree, run_on(process_set, task))


def alltoall(value: Any, splits: Any = None, *, name: str = "", process_set: ProcessSet | None = None) -> Any:
    """Rows for each rank → rows from each rank, in the order of ranks.

    splits: how many rows go to each rank; None: the same number to each. With splits the result is
    `(rows, received_splits)`, the second an int32 array.
    """
    if in_jit.is_traced([value]):
        if splits is not None:
            raise OptionError("a traced alltoall has equal splits", where="splits", remedy="call it outside jit")
        return in_jit.exchange_rows(value, process_set)

    def task(members: ProcessSet) -> tuple[Any, np.ndarray]:
        with report_to_all(members):
            tensor = tensors.read(value, "value")
            counts = _row_counts(tensor, splits, members.size())
        return _all_to_all(members, tensor, counts, name)

    rows, received = run_on(process_set, task)
    return rows if splits is None else (rows, received)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Returns once every rank has called it."""
    run_on(process_set, lambda members: agree(members, "barrier", _EMPTY, follow=Follow.NOTHING))


def _in_background(function: Callable[_P, Any]) -> Callable[_P, Handle]:
    @functools.wraps(function)
    def submit(*args: _P.args, **kwargs: _P.kwargs) -> Handle:
        return job.current().dispatcher.submit(lambda: function(*args, **kwargs))

    submit.__name__ = submit.__qualname__ = f"{function.__name__}_async"
    submit.__doc__ = (
        f"`{function.__name__}` in the background: a handle for `synchronize` and `poll`.\n\n"
        "The arguments must not change until it is done."
    )
    submit.__annotations__ = {**function.__annotations__, "return": Handle}
    return submit


allreduce_async = _in_background(allreduce)
allgather_async = _in_background(allgather)
broadcast_async = _in_background(broadcast)
reducescatter_async = _in_background(reducescatter)
alltoall_async = _in_background(alltoall)

#: Horovod's names for groups: a tree, of which a list is one, is a group here.
grouped_allreduce, grouped_allreduce_async = allreduce, allreduce_async
grouped_allgather, grouped_allgather_async = allgather, allgather_async
grouped_broadcast, grouped_broadcast_async = broadcast, broadcast_async
grouped_reducescatter, grouped_reducescatter_async = reducescatter, reducescatter_async


# ---- how they run ----------------------------------------------------------------
def run_on(process_set: ProcessSet | None, task: Callable[[ProcessSet], _R]) -> _R:
    """Run a task on some ranks, in its turn."""
    chosen = job.resolve_process_set(process_set)

    def run_task() -> _R:
        with watch.current().collective(chosen.ranks):
            return task(chosen)

    result: _R = job.current().dispatcher.run(run_task)
    return result


@contextlib.contextmanager
def report_to_all(process_set: ProcessSet) -> Iterator[None]:
    """An error in the block, at this rank alone, is told to the others, so that none waits."""
    try:
        yield
    except (CollectiveError, OptionError) as error:
        report_failure(process_set, error)
        raise


def root_place(process_set: ProcessSet, root_rank: int) -> int:
    """The root's place in the set. Raises OptionError for a rank that is not in it."""
    if root_rank in process_set.ranks:
        return process_set.ranks.index(root_rank)
    raise OptionError(f"rank {root_rank} is not in {process_set}", where="root_rank", remedy="its number in the job")


_LEAF = jax.tree.structure(0)


def _leaves(value: Any) -> tuple[list[Any], list[str], Any]:
    """Leaves of a tree, the path of each, the tree."""
    if type(value) is np.ndarray:
        return [value], ["value"], _LEAF
    leaves, tree = jax.tree.flatten(value)
    try:
        return leaves, _paths_of(tree), tree
    except TypeError:  # a node of the user's own that cannot be a key, or holds arrays alone
        entries, _ = jax.tree_util.tree_flatten_with_path(value)
        return leaves, ["value" + jax.tree_util.keystr(path) for path, _ in entries], tree


@functools.lru_cache(maxsize=256)
def _paths_of(tree: Any) -> list[str]:
    """The path of each leaf, as errors name it."""
    entries, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return ["value" + jax.tree_util.keystr(path) for path, _ in entries]


def _read_reducible(
    leaves: Sequence[Any], paths: Sequence[str], op: ReduceOp, prescale: float, postscale: float
) -> list[Tensor]:
    inputs = tensors.read_all(leaves, paths)
    checked: set[np.dtype] = set()
    for tensor, path in zip(inputs, paths, strict=True):
        if not tensor.reducible:
            raise CollectiveError("random keys cannot be reduced", where=path, remedy="broadcast them")
        if tensor.dtype not in checked:
            operations.check_reducible(op, tensor.dtype, path)
            operations.check_factor(prescale, tensor.dtype, path)
            operations.check_factor(postscale, tensor.dtype, path)
            checked.add(tensor.dtype)
    return inputs


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8) if array.size else _EMPTY


def _concatenate_bytes(arrays: Sequence[np.ndarray]) -> np.ndarray:
    parts = [_bytes(array) for array in arrays]
    return parts[0] if len(parts) == 1 else np.concatenate([_EMPTY, *parts])


def _describe_types(inputs: Sequence[Tensor]) -> list[str]:
    """Types of arrays whose number of rows may differ."""
    return [describe_type(["*", *tensor.shape[1:]], tensor.dtype) for tensor in inputs]


# ---- allreduce -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Reduction:
    """What is done to each array: `postscale · reduce(prescale · array)`, in a type on the wire."""

    op: ReduceOp
    prescale: float
    postscale: float
    compression: Cast | None

    def wire_type(self, dtype: np.dtype) -> np.dtype:
        return self.compression.wire_type(dtype) if self.compression else dtype

    def on_wire(self, array: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = operations.scale(array, self.prescale)
        return scaled.astype(self.wire_type(array.dtype), copy=False)


@functools.lru_cache(maxsize=1024)
def _call_of(reduction: _Reduction, kind: str, name: str, types: tuple[TensorType, ...]) -> str:
    """The text of a reduction, for `agree`."""
    is_cast = reduction.compression is not None and reduction.compression.type_name
    options = [f"as {reduction.compression.type_name}"] if reduction.compression and is_cast else []
    if (reduction.prescale, reduction.postscale) != (1.0, 1.0):
        options.append(f"scaled by {reduction.prescale!r} and {reduction.postscale!r}")
    return describe(
        f"{kind} {reduction.op.value}", name, [*(describe_type(*tensor_type) for tensor_type in types), *options]
    )


def _reduce(
    process_set: ProcessSet,
    inputs: Sequence[Tensor],
    reduction: _Reduction,
    name: str,
    *,
    kind: str = "allreduce",
    with_joined: bool = True,
) -> list[Any]:
    call = _call_of(reduction, kind, name, tuple([tensor.type for tensor in inputs]))
    wires = [reduction.wire_type(tensor.dtype) for tensor in inputs]
    groups = fusion.by_type(wires)
    nbytes = sum(tensor.size * wire.itemsize for tensor, wire in zip(inputs, wires, strict=True))
    results: list[Any] = [None] * len(inputs)
    if nbytes <= capacity(process_set.size()):
        sent = {at: reduction.on_wire(inputs[at].host()) for group in groups for at in group}
        follow = Follow.NOTHING if with_joined else Follow.REFUSE
        agreement = agree(process_set, call, _concatenate_bytes(list(sent.values())), follow=follow)
        reduced = _reduce_records(agreement, [[sent[at] for at in group] for group in groups], reduction.op)
        _check_integers(agreement, groups, inputs, wires, reduction.op, call)
    else:
        buffers = [
            fusion.Buffer(reduction.op, wires[group[0]], sum(inputs[at].size for at in group)) for group in groups
        ]
        follow = Follow.REDUCE if with_joined else Follow.REFUSE
        message = fusion.encode(buffers, _bound_of_scalars(inputs), any(tensor.is_integer for tensor in inputs))
        agreement = agree(process_set, call, message, follow=follow)
        fusion.decode(agreement.active_messages(), call)
        divisor = len(agreement.active_places()) if reduction.op is ReduceOp.AVERAGE else 1
        reduced = [_reduce_group(process_set, [inputs[at] for at in group], reduction, divisor) for group in groups]
    for group, arrays in zip(groups, reduced, strict=True):
        for at, array in zip(group, arrays, strict=True):
            tensor = inputs[at]
            whole = array.astype(tensor.dtype) if array.dtype != tensor.dtype else array
            results[at] = tensor.restore(operations.scale(whole, reduction.postscale))
    return results


def _reduce_records(
    agreement: Agreement, groups: Sequence[Sequence[np.ndarray]], op: ReduceOp
) -> list[list[np.ndarray]]:
    """The reduction of what came in the records themselves. groups: this rank's arrays, as they were sent."""
    results, start = [], 0
    rows = np.stack(agreement.active_messages())
    for arrays in groups:
        nbytes = sum(array.nbytes for array in arrays)
        values = np.ascontiguousarray(rows[:, start : start + nbytes]).view(arrays[0].dtype)
        reduced = operations.reduce_rows(values, op)
        results.append(fusion.unflatten(reduced, [array.shape for array in arrays]))
        start += nbytes
    return results


def _check_integers(
    agreement: Agreement,
    groups: Sequence[Sequence[int]],
    inputs: Sequence[Tensor],
    wires: Sequence[np.dtype],
    op: ReduceOp,
    call: str,
) -> None:
    """Raises CollectiveError where a reduction of Python's integers leaves 64 bits."""
    start = 0
    for at in (at for group in groups for at in group):
        end = start + inputs[at].size * wires[at].itemsize
        if inputs[at].is_integer:
            values = [row[start:end].copy().view(np.int64).item() for row in agreement.active_messages()]
            operations.check_number(values, op, call)
        start = end


def _bound_of_scalars(inputs: Sequence[Tensor]) -> int:
    """The largest magnitude of 64-bit scalars: other ranks may have them as Python's integers."""
    scalars = [tensor for tensor in inputs if tensor.shape == () and tensor.dtype == np.dtype(np.int64)]
    return max((abs(int(tensor.host())) for tensor in scalars), default=0)


def _reduce_group(process_set: ProcessSet, inputs: Sequence[Tensor], reduction: _Reduction, divisor: int) -> list[Any]:
    """The reduction of tensors of one type on the wire. Sums of cast values are divided in the full type."""
    is_cast = any(tensor.dtype != reduction.wire_type(tensor.dtype) for tensor in inputs)
    on_wire = 1 if is_cast else divisor
    on_device = [tensor.device for tensor in inputs if tensor.device is not None]
    if len(on_device) == len(inputs):
        wire = reduction.wire_type(inputs[0].dtype)
        scaled = [operations.scale(array, reduction.prescale).astype(wire) for array in on_device]
        reduced: list[Any] = list(fusion.reduce_on_device(process_set, scaled, reduction.op, on_wire))
    else:
        flat = fusion.flatten([reduction.on_wire(tensor.host()) for tensor in inputs])
        flat = fusion.reduce_flat(process_set, flat, reduction.op, on_wire)
        reduced = list(fusion.unflatten(flat, [tensor.shape for tensor in inputs]))
    if not is_cast:
        return reduced
    return [array.astype(tensor.dtype) / divisor for array, tensor in zip(reduced, inputs, strict=True)]


# ---- reducescatter ---------------------------------------------------------------
def row_starts(rows: int, size: int) -> list[int]:
    """Where each rank's rows begin, and the end: the first `rows % size` ranks have one more."""
    return [place * (rows // size) + min(place, rows % size) for place in range(size + 1)]


def _reduce_scatter(process_set: ProcessSet, inputs: Sequence[Tensor], reduction: _Reduction, name: str) -> list[Any]:
    place, size = process_set.rank(), process_set.size()
    is_sum = reduction.op in (ReduceOp.SUM, ReduceOp.AVERAGE)
    if not is_sum or sum(tensor.nbytes for tensor in inputs) <= capacity(size):
        whole = _reduce(process_set, inputs, reduction, name, kind="reducescatter", with_joined=False)
        bounds = [row_starts(tensor.shape[0], size)[place : place + 2] for tensor in inputs]
        return [array[start:end] for array, (start, end) in zip(whole, bounds, strict=True)]
    agree(process_set, _call_of(reduction, "reducescatter", name, tuple([tensor.type for tensor in inputs])), _EMPTY)
    divisor = size if reduction.op is ReduceOp.AVERAGE else 1
    results: list[Any] = [None] * len(inputs)
    for group in fusion.by_type([tensor.dtype for tensor in inputs]):
        members = [inputs[at] for at in group]
        blocks = np.concatenate(
            [_row_blocks(operations.scale(tensor.host(), reduction.prescale), size) for tensor in members], axis=1
        )
        mine, start = _scatter_blocks(process_set, blocks, divisor), 0
        for at, tensor in zip(group, members, strict=True):
            starts = row_starts(tensor.shape[0], size)
            shape = (starts[place + 1] - starts[place], *tensor.shape[1:])
            width, count = int(np.prod(tensor.shape[1:], dtype=np.int64)), shape[0]
            array = mine[start : start + count * width].reshape(shape)
            results[at] = tensor.restore(operations.scale(array, reduction.postscale))
            start += starts[1] * width
    return results


def _row_blocks(array: np.ndarray, size: int) -> np.ndarray:
    """[size, n]: the rows of each rank, one rank a row, padded to the first rank's number."""
    starts = row_starts(array.shape[0], size)
    width = int(np.prod(array.shape[1:], dtype=np.int64))
    if array.shape[0] % size == 0:
        return array.reshape(size, starts[1] * width)
    blocks = np.zeros((size, starts[1] * width), array.dtype)
    for place in range(size):
        rows = array[starts[place] : starts[place + 1]].reshape(-1)
        blocks[place, : rows.size] = rows
    return blocks


def _scatter_blocks(process_set: ProcessSet, blocks: np.ndarray, divisor: int) -> np.ndarray:
    """This rank's row of the sum over ranks of [size, n] blocks, in pieces of columns."""
    size, length = blocks.shape
    if size == 1:
        return operations.divide(blocks[0].copy(), divisor)
    mine = np.empty(length, blocks.dtype)
    for start, count in fusion.pieces(process_set, length, blocks.dtype.itemsize * size, ReduceOp.SUM):
        part = np.zeros((1, size, programs.round_up(count)), blocks.dtype)
        part[0, :, :count] = blocks[:, start : start + count]
        array = programs.run(process_set, programs.scatter_sum, part)
        mine[start : start + count] = programs.fetch(array, process_set)[0, :count]
    return operations.divide(mine, divisor)


# ---- allgather, broadcast, alltoall ----------------------------------------------
def _gather(process_set: ProcessSet, inputs: Sequence[Tensor], name: str) -> list[Any]:
    rows = np.asarray([tensor.shape[0] if tensor.shape else 1 for tensor in inputs], np.int64)
    message = _concatenate_bytes([rows, *(tensor.host() for tensor in inputs)])
    call = describe("allgather", name, _describe_types(inputs))
    received, _ = messages.gather(process_set, call, message)
    parts: list[list[np.ndarray]] = [[] for _ in inputs]
    for raw in received:
        if not raw.size:
            continue  # a rank without data
        at = rows.nbytes
        for index, (tensor, count) in enumerate(zip(inputs, raw[:at].copy().view(np.int64).tolist(), strict=True)):
            tail = tensor.shape[1:]
            nbytes = count * int(np.prod(tail, dtype=np.int64)) * tensor.dtype.itemsize
            parts[index].append(np.frombuffer(raw[at : at + nbytes].tobytes(), tensor.dtype).reshape(count, *tail))
            at += nbytes
    return [tensor.restore(np.concatenate(arrays)) for tensor, arrays in zip(inputs, parts, strict=True)]


def _broadcast(process_set: ProcessSet, inputs: Sequence[Tensor], root: int, name: str) -> list[Any]:
    is_root = process_set.rank() == root
    message = _concatenate_bytes([tensor.host() for tensor in inputs]) if is_root else None
    call = describe(
        f"broadcast from {process_set.ranks[root]}", name, [describe_type(*tensor.type) for tensor in inputs]
    )
    raw, at = messages.broadcast(process_set, call, message, root), 0
    results = []
    for tensor in inputs:
        array = np.frombuffer(bytearray(raw[at : at + tensor.nbytes]), tensor.dtype).reshape(tensor.shape)
        results.append(tensor.restore(array))
        at += tensor.nbytes
    return results


def _row_counts(tensor: Tensor, splits: Any, size: int) -> list[int]:
    """How many rows go to each rank. Raises CollectiveError and OptionError."""
    if not tensor.shape:
        raise CollectiveError("a scalar has no rows to send", where="value", remedy="give it a dimension")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            remedy = "pass splits, a number of rows for each rank"
            raise OptionError(f"{rows} rows do not divide among {size} ranks", where="value", remedy=remedy)
        return [rows // size] * size
    counts = np.asarray(splits)
    if counts.shape != (size,) or counts.dtype.kind not in "iu" or (counts < 0).any() or int(counts.sum()) != rows:
        raise OptionError(
            f"{counts.tolist()} is no way to split {rows} rows among {size} ranks",
            where="splits",
            remedy=f"{size} whole numbers that add up to {rows}",
        )
    return [int(count) for count in counts]


def _all_to_all(process_set: ProcessSet, tensor: Tensor, counts: Sequence[int], name: str) -> tuple[Any, np.ndarray]:
    tail = tensor.shape[1:]
    width = int(np.prod(tail, dtype=np.int64)) * tensor.dtype.itemsize
    raw = _bytes(tensor.host())
    ends = np.cumsum([0, *counts]) * width
    blocks = [raw[start:end] for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    lengths = [np.asarray([count], np.int64).view(np.uint8) for count in counts]
    call = describe("alltoall", name, _describe_types([tensor]))
    received = messages.exchange(
        process_set, call, [np.concatenate(pair) for pair in zip(lengths, blocks, strict=True)]
    )
    rows = np.asarray([int(block[:8].copy().view(np.int64)[0]) for block in received], np.int32)
    contents = np.concatenate([block[8:] for block in received])
    array = np.frombuffer(bytearray(contents), tensor.dtype).reshape(int(rows.sum()), *tail)
    return tensor.restore(array), rows
