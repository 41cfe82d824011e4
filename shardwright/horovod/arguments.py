"""Arguments of Horovod's calls, in Horovod's order, as `sw.ranks` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from shardwright.errors import OptionError
from shardwright.horovod.errors import OptionValueError
from shardwright.ranks import Handle, ReduceOp, operations
from shardwright.ranks import job as jobs
from shardwright.ranks.compression import Cast


def read_op(op: ReduceOp | str | None, average: Any = None) -> ReduceOp:
    """The operation of `op` and of `average`, the older way to say it; neither: the average.

    An operation at the place of `average` is taken for one. Raises OptionValueError for both.
    """
    if isinstance(average, ReduceOp | str):
        op, average = average, None
    if op is not None and average is not None:
        raise OptionValueError("op and average say the same", where="op", remedy="leave average out")
    if average is not None:
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    try:
        return ReduceOp.AVERAGE if op is None else operations.to_op(op)
    except OptionError as error:
        raise OptionValueError(error.message, where=error.where, remedy=error.remedy) from None


def read_name(name: Any) -> str:
    """A call's name; "" without one."""
    return "" if name is None else str(name)


def read_cast(compression: Any) -> Cast | None:
    """The compression where it is one that collectives do themselves; None for others, and for none."""
    return compression if isinstance(compression, Cast) and compression.type_name else None


def require_cast(compression: Any) -> Cast | None:
    """`read_cast` for exchanges that only cast. Raises OptionValueError for compressors of the user's own."""
    if is_own_compressor(compression):
        raise OptionValueError(
            f"{compression!r} for gradients", where="compression", remedy="Compression.fp16 or bf16, or hvd.allreduce"
        )
    return read_cast(compression)


def is_own_compressor(compression: Any) -> bool:
    """Whether it is a compressor of the user's own, with `compress` and `decompress`. Raises OptionValueError."""
    if compression is None or isinstance(compression, Cast):
        return False
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return True
    raise OptionValueError(
        f"{compression!r} is no compression", where="compression", remedy="Compression.none, .fp16, .bf16 or your own"
    )


# ---- in the background ------------------------------------------------------------
class _Named:
    """Calls in the background that are not over, by kind, name and process set."""

    handles: ClassVar[dict[tuple[str, str, Any], Handle]] = {}


def submit(kind: str, name: Any, process_set: Any, task: Callable[[], Any]) -> Handle:
    """Run a task in the background. Raises OptionValueError where one of its kind and name is under way."""
    key = kind, read_name(name), getattr(process_set, "ranks", None)
    before = _Named.handles.get(key)
    if name and before is not None and not before.done():
        raise OptionValueError(
            f"{kind} {name!r} is under way", where="name", remedy="synchronize it first, or give this one another name"
        )
    handle = jobs.current().dispatcher.submit(task)
    if name:
        _Named.handles[key] = handle
    return handle
