"""`shardwright.annotate`: pins on the dimensions of a value, inside a step.

A JAX primitive: the identity everywhere. Only while Shardwright lowers the step, it leaves a mark in the HLO text: the
custom call `config.ANNOTATION_TARGET`. The planner reads it as pins; emission removes it. As a linear primitive of its
own, it survives grad (the cotangent gets the same pins), vmap (dimension numbers shift), scan and remat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.source_info_util import register_exclusion
from jax.interpreters import ad, batching, mlir

from shardwright.errors import AnnotationError
from shardwright.options.plan_options import Pin
from shardwright.reserved_names import ANNOTATION_TARGET

register_exclusion(__file__)  # messages name the line that calls annotate()

#: (dimension, pin as written in `backend_config`), in order of dimensions.
EncodedPins = tuple[tuple[int, str], ...]

_is_lowering_for_us: ContextVar[bool] = ContextVar("shardwright_is_lowering", default=False)


def annotate(x: Any, pins: Mapping[int, Pin]) -> Any:
    """`x`, with dimensions pinned for the planner.

    Args:
      x: one array, traced or concrete.
      pins: dimension → an axis name of the mesh (or a tuple of them, major first),
        `True` ("split over some axis") or `None` ("not split"). Negative dimensions count from the end; missing ones
        are free.

    Returns `x` itself in meaning: outside a parallelized step nothing changes.

    Raises AnnotationError: a dimension missing in `x`, a dimension or an axis named twice, a pin of another kind. A pin
    beyond the planner's means raises it when the step is planned.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise AnnotationError(
            f"annotate() takes one array, not {type(x).__name__}",
            remedy="annotate each leaf: jax.tree.map(lambda leaf: shardwright.annotate(leaf, {...}), tree)",
        )
    encoded = _encode_pins(tuple(x.shape), pins)
    return _bind(x, encoded) if encoded else x


@contextmanager
def keep_annotations() -> Iterator[None]:
    """While active in this thread, annotations are written into JAX's lowered text."""
    token = _is_lowering_for_us.set(True)
    try:
        yield
    finally:
        _is_lowering_for_us.reset(token)


def is_lowering_for_us() -> bool:
    """Whether `keep_annotations` is active in this thread."""
    return _is_lowering_for_us.get()


def _encode_pins(shape: tuple[int, ...], pins: Mapping[int, Pin]) -> EncodedPins:
    encoded: dict[int, str] = {}
    for dimension, pin in pins.items():
        if isinstance(dimension, bool) or not isinstance(dimension, int) or not -len(shape) <= dimension < len(shape):
            raise AnnotationError(
                f"dimension {dimension!r} does not exist in an array of shape {_text(shape)}",
                remedy=f"pin dimensions 0 to {len(shape) - 1}" if shape else "a scalar has nothing to pin",
            )
        number = dimension % len(shape)
        if number in encoded:
            raise AnnotationError(
                f"dimension {number} of an array of shape {_text(shape)} is pinned twice",
                remedy=f"it is {number - len(shape)} as well: pin one of the two",
            )
        encoded[number] = _encode_pin(pin, f"dimension {number} of an array of shape {_text(shape)}")
    named = [axis for text in encoded.values() if text not in "-*" for axis in text.split("+")]
    for axis in named:
        if named.count(axis) > 1:
            raise AnnotationError(
                f"axis {axis!r} is named for two dimensions of an array of shape {_text(shape)}",
                remedy="an axis can split one dimension of a tensor",
            )
    return tuple(sorted(encoded.items()))


def _encode_pin(pin: Pin, what: str) -> str:
    if pin is None or pin is False or pin == ():
        return "-"
    if pin is True:
        return "*"
    axes = (pin,) if isinstance(pin, str) else pin
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) and axis.isidentifier() for axis in axes):
        raise AnnotationError(
            f"{what} is pinned to {pin!r}", remedy="a pin is an axis name, a tuple of axis names, True or None"
        )
    return "+".join(axes)


def _text(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


# ---- the primitive -----------------------------------------------------------

_annotate_p = Primitive("shardwright_annotate")


def _bind(x: Any, pins: EncodedPins) -> Any:
    return _annotate_p.bind(x, pins=pins)  # type: ignore[no-untyped-call]


def _identity(x: Any, *, pins: EncodedPins) -> Any:
    return x


def _transpose(cotangent: Any, x: Any, *, pins: EncodedPins) -> list[Any]:
    return [_bind(cotangent, pins)]


def _batch(arguments: Sequence[Any], dims: Sequence[int], *, pins: EncodedPins) -> tuple[Any, int]:
    (x,), (batch,) = arguments, dims
    shifted = tuple((number + (number >= batch), pin) for number, pin in pins)
    return _bind(x, shifted), batch


def _lower(ctx: mlir.LoweringRuleContext, x: Any, *, pins: EncodedPins) -> Any:
    if not is_lowering_for_us():
        return [x]
    config = ",".join(f"{number}:{pin}" for number, pin in pins)
    call = jax.ffi.build_ffi_lowering_function(ANNOTATION_TARGET, backend_config=config, api_version=2)
    return call(ctx, x).results


_annotate_p.def_impl(_identity)  # type: ignore[no-untyped-call]
_annotate_p.def_abstract_eval(_identity)  # type: ignore[no-untyped-call]
ad.deflinear2(_annotate_p, _transpose)  # type: ignore[no-untyped-call]
batching.primitive_batchers[_annotate_p] = _batch
mlir.register_lowering(_annotate_p, _lower, cacheable=False)
