"""The same collectives inside a jitted function, and `jit`: a function on every rank at once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.errors import CollectiveError, OptionError
from shardwright.ranks import job, lifeline, operations, programs, watch
from shardwright.ranks.compression import Cast
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import AXIS, ProcessSet
from shardwright.ranks.programs_cache import ProgramHolder

#: Types that JAX has under jax_enable_x64 alone; without it they would be cut.
_WIDE_TYPES = frozenset({"int64", "uint64", "float64", "complex128"})
#: Where errors say that they are, of values that a program computes.
_TRACED = "a traced value"


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether a value belongs to a function under tracing."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


@contextlib.contextmanager
def _on_axis(process_set: ProcessSet | None) -> Iterator[None]:
    if process_set is not None and process_set.ranks != job.world().ranks:
        raise CollectiveError(
            "a traced collective is over all ranks of the mesh",
            where=repr(process_set),
            remedy="give the set to sw.ranks.jit(function, process_set=…), or call it outside",
        )
    try:
        lax.axis_size(AXIS)
    except NameError:
        raise CollectiveError(
            f"a collective in a jitted function without the mesh axis {AXIS!r}",
            remedy="decorate with sw.ranks.jit instead of jax.jit, or call the collective outside",
        ) from None
    yield


def reduce_leaves(
    leaves: Sequence[Any],
    op: ReduceOp,
    process_set: ProcessSet | None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compression: Cast | None = None,
) -> list[Any]:
    """`allreduce` of traced leaves; XLA combines their messages."""
    with _on_axis(process_set):
        return [_reduce(_to_array(leaf), op, prescale, postscale, compression) for leaf in leaves]


def _reduce(value: Any, op: ReduceOp, prescale: float, postscale: float, compression: Cast | None) -> Any:
    dtype = _check_reducible(value, op, prescale, postscale)
    wire = compression.wire_type(dtype) if compression else dtype
    sent = operations.scale(value, prescale).astype(np.uint8 if dtype == np.dtype(bool) else wire)
    reduced = programs.REDUCE_BODIES[op](sent).astype(dtype)
    if op is ReduceOp.AVERAGE:
        reduced = reduced / lax.axis_size(AXIS)
    return operations.scale(reduced, postscale)


def _check_reducible(value: Any, op: ReduceOp, prescale: float, postscale: float) -> np.dtype:
    """The element type. Raises CollectiveError where that is not reduced, or not scaled."""
    dtype: np.dtype = np.dtype(value.dtype)
    operations.check_reducible(op, dtype, _TRACED)
    for factor in (prescale, postscale):
        operations.check_factor(factor, dtype, _TRACED)
    return dtype


def gather_leaves(leaves: Sequence[Any], process_set: ProcessSet | None) -> list[Any]:
    """`allgather` of traced leaves, of equal length at every rank."""
    with _on_axis(process_set):
        return [lax.all_gather(jnp.atleast_1d(_to_array(leaf)), AXIS, tiled=True) for leaf in leaves]


def broadcast_leaves(leaves: Sequence[Any], root_rank: int, process_set: ProcessSet | None) -> list[Any]:
    """`broadcast` of traced leaves, by their bits."""
    with _on_axis(process_set):
        if not 0 <= root_rank < lax.axis_size(AXIS):
            raise OptionError(f"there is no rank {root_rank}", where="root_rank", remedy="a rank of the mesh")
        return [_broadcast(_to_array(leaf), root_rank) for leaf in leaves]


def _broadcast(value: Any, root: int) -> Any:
    is_root = lax.axis_index(AXIS) == root
    if value.dtype == jnp.bool_:
        return lax.psum(jnp.where(is_root, value, False).astype(jnp.uint8), AXIS).astype(jnp.bool_)  # type: ignore[no-untyped-call]
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return lax.complex(_broadcast(value.real, root), _broadcast(value.imag, root))
    bits = lax.bitcast_convert_type(value, np.dtype(f"uint{value.dtype.itemsize * 8}"))
    return lax.bitcast_convert_type(lax.psum(jnp.where(is_root, bits, 0), AXIS), value.dtype)  # type: ignore[no-untyped-call]


def scatter_leaves(
    leaves: Sequence[Any], op: ReduceOp, process_set: ProcessSet | None, prescale: float, postscale: float
) -> list[Any]:
    """`reducescatter` of traced leaves whose rows divide among the ranks."""
    with _on_axis(process_set):
        return [_scatter(_to_array(leaf), op, prescale, postscale) for leaf in leaves]


def _scatter(value: Any, op: ReduceOp, prescale: float, postscale: float) -> Any:
    size = lax.axis_size(AXIS)
    if value.ndim == 0 or value.shape[0] % size:
        raise CollectiveError(
            f"rows of {value.shape} do not divide among {size} ranks", remedy="call reducescatter outside jit"
        )
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        rows = value.shape[0] // size
        return lax.dynamic_slice_in_dim(
            _reduce(value, op, prescale, postscale, None), lax.axis_index(AXIS) * rows, rows
        )
    _check_reducible(value, op, prescale, postscale)
    sent = operations.scale(value, prescale)
    mine = lax.psum_scatter(sent, AXIS, scatter_dimension=0, tiled=True)  # type: ignore[no-untyped-call]
    return operations.scale(mine, postscale / size if op is ReduceOp.AVERAGE else postscale)


def exchange_rows(value: Any, process_set: ProcessSet | None) -> Any:
    """`alltoall` of a traced value whose rows divide among the ranks."""
    with _on_axis(process_set):
        size = lax.axis_size(AXIS)
        if value.ndim == 0 or value.shape[0] % size:
            raise CollectiveError(
                f"rows of {value.shape} do not divide among {size} ranks", remedy="call alltoall outside jit"
            )
        return lax.all_to_all(value, AXIS, 0, 0, tiled=True)  # type: ignore[no-untyped-call]


# ---- running a function on all ranks ---------------------------------------------
def jit(
    function: Callable[..., Any] | None = None,
    *,
    process_set: ProcessSet | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """`jax.jit` for ranks: `function` runs at every rank on that rank's own values, and may call collectives.

    `allreduce` and its like on what it computes, `DistributedOptimizer.update`, `jax.lax.psum(x, sw.ranks.AXIS)` and
    `flax.linen.BatchNorm(axis_name=sw.ranks.AXIS)` become collectives of one XLA program, which overlaps them with
    computation. Arguments and results are trees of arrays, this rank's own: nothing is split or put together. All
    ranks call it in the same order as other collectives, with arrays of the same shapes and types.

        @sw.ranks.jit
        def step(params, opt_state, batch): ...

    donate_argnums: positions whose arrays may be overwritten. Raises CollectiveError and RankLostError.
    """
    if function is None:
        return functools.partial(jit, process_set=process_set, donate_argnums=donate_argnums)
    return _Function(function, process_set, donate_argnums)


class _Function(ProgramHolder):
    """A function compiled for all ranks, once a tree and its shapes and types."""

    def __init__(
        self, function: Callable[..., Any], process_set: ProcessSet | None, donate: int | Sequence[int]
    ) -> None:
        super().__init__()
        functools.update_wrapper(self, function)
        self._function = function
        self._process_set = process_set
        self._donate = frozenset((donate,) if isinstance(donate, int) else donate)
        self._compiled: dict[Any, _Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = job.resolve_process_set(self._process_set)
        return job.current().dispatcher.run(lambda: self._run(chosen, args, kwargs))

    def drop(self) -> None:
        """Drop the programs of a generation at its end."""
        self._compiled.clear()

    def _run(self, process_set: ProcessSet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entries, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        leaves = [_local(leaf, path) for path, leaf in entries]
        donated = tuple(index for index, (path, _) in enumerate(entries) if _argument(path) in self._donate)
        types = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (process_set.mesh, tree, types, _has_64_bits())
        if key not in self._compiled:
            self._compiled[key] = _Compiled(self._function, process_set, tree, [leaf.ndim for leaf in leaves], donated)
        call = f"the jitted function {getattr(self._function, '__name__', 'function')}"
        line = lifeline.current()
        if line is not None:
            line.check()
        with watch.current().collective(process_set.ranks, f"start of {call}"):
            results = self._compiled[key](leaves)
        arrays = [leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)]
        if arrays and process_set.size() > 1:
            watch.current().leave_pending(process_set.ranks, call, min(arrays, key=lambda array: array.nbytes))
        return results


def _has_64_bits() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def _argument(path: tuple[Any, ...]) -> int | None:
    """The position of the argument of a leaf of `(args, kwargs)`."""
    return path[1].idx if path[0].idx == 0 else None


def _local(leaf: Any, path: tuple[Any, ...]) -> jax.Array:
    """A leaf as an array of this rank. Raises CollectiveError."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        where = jax.tree_util.keystr(path)
        raise CollectiveError("this jax.Array lies on several ranks", where=where, remedy="pass this rank's own part")
    array: jax.Array = _to_array(leaf, jax.tree_util.keystr(path))
    return array


def _to_array(leaf: Any, where: str = _TRACED) -> Any:
    """A leaf as an array, traced or not: of its own type. Raises CollectiveError where JAX has no such type."""
    if isinstance(leaf, jax.core.Tracer):
        return leaf
    dtype = getattr(leaf, "dtype", None)
    if (getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]) in _WIDE_TYPES and not _has_64_bits():
        raise CollectiveError(
            f"an array of {dtype}, while jax_enable_x64 is off",
            where=where,
            remedy="cast it to 32 bits, or set jax_enable_x64",
        )
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return jax.device_put(leaf.copy())  # jnp.asarray compiles a program for each shape
    try:
        return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except TypeError:
        raise CollectiveError(
            f"a {type(leaf).__qualname__} is no array",
            where=where,
            remedy="bind what is no array to the function: functools.partial(step, model)",
        ) from None
    except OverflowError:
        raise CollectiveError(
            f"{leaf} has more bits than JAX's integers", where=where, remedy="pass a float, or set jax_enable_x64"
        ) from None


class _Compiled:
    """A program for one tree of arguments.

    Scalars have no dimension to split: outside they count as replicated, though each rank has its own.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        process_set: ProcessSet,
        tree: Any,
        ndims: list[int],
        donated: tuple[int, ...],
    ) -> None:
        self._process_set = process_set
        self._out: tuple[Any, list[bool]] | None = None
        split, whole = process_set.split.spec, process_set.whole.spec

        def on_rank(*leaves: Any) -> tuple[list[Any], list[Any]]:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            results, out_tree = jax.tree.flatten(function(*args, **kwargs))
            results = [jnp.asarray(result) for result in results]
            self._out = out_tree, [result.ndim == 0 for result in results]
            return [result for result in results if result.ndim], [result for result in results if not result.ndim]

        mapped = jax.shard_map(
            on_rank,
            mesh=process_set.mesh,
            in_specs=tuple(split if ndim else whole for ndim in ndims),
            out_specs=(split, whole),
            check_vma=False,
        )
        self._program = jax.jit(mapped, donate_argnums=donated)

    def __call__(self, leaves: list[jax.Array]) -> Any:
        try:
            results = self._program(*[self._lift(leaf) for leaf in leaves])
        except (RuntimeError, ValueError) as error:
            if programs.is_broken_collective(error):
                raise programs.to_collective_error(error, self._process_set) from error
            raise
        assert self._out is not None  # the program was traced
        tree, are_scalars = self._out
        arrays, scalars = (iter([result.addressable_data(0) for result in group]) for group in results)
        return jax.tree.unflatten(tree, [next(scalars if is_scalar else arrays) for is_scalar in are_scalars])

    def _lift(self, leaf: jax.Array) -> jax.Array:
        if leaf.ndim:
            return self._process_set.put(leaf)
        part = jax.device_put(leaf, self._process_set.device)
        return jax.make_array_from_single_device_arrays((), self._process_set.whole, [part])
