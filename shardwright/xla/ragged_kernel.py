"""JAX's kernel of ragged products (jax 0.10.2, `jax.experimental.pallas.ops.gpu`), lowered for a device's part.

Lowering needs no GPU. The kernel writes no rows behind the last group: they are 0 here. It zeroes rows of other groups
by multiplication, so that what is not a number in one group is not one in the next group's gradient either. Devices
without the kernel compute the same written out, as `jax.lax.ragged_dot`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.cost import hardware_profile, platform_of_profile
from shardwright.errors import PlatformError
from shardwright.kernels.ragged import DEPTH, OF_BLOCKS, SIDE
from shardwright.kernels.rules import Shapes
from shardwright.xla.tuning import RAGGED_COLUMNS, RAGGED_PARTS, RAGGED_STEPS

_PACKAGE = "jax.experimental.pallas.ops.gpu"

_TYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}

_WEIGHTS = jax.lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def multiprocessors_of_devices(hardware: str, platform: str | None) -> int:
    """Multiprocessors of devices that run the kernel; 0: they do not.

    hardware: the plan's profile; one that is not here is taken for a device without. platform: of the devices, in JAX's
    spelling; None: the profile's.
    """
    own = platform_of_profile(hardware)
    if own is None or (platform or own) not in ("cuda", "gpu"):
        return 0
    ragged = hardware_profile(hardware).ragged
    return ragged.multiprocessors if ragged is not None and ragged.kernel_efficiency else 0


@lru_cache(maxsize=RAGGED_PARTS)
def lower_ragged(config: str, shapes: Shapes, element_type: str, multiprocessors: int) -> str:
    """The StableHLO of a part of a call (`shardwright.kernels.ragged`).

    shapes: of its operands. Raises PlatformError: JAX's kernel does not take them, or is not there.
    """
    product = config.removesuffix(OF_BLOCKS)

    def part(rows: Any, other: Any, sizes: Any) -> Any:
        if product == config:
            return _PRODUCTS[product](rows, other, sizes.sum(0), multiprocessors)
        return _of_blocks(product, rows, other, sizes, multiprocessors)

    kind = _TYPES[element_type]
    types = [
        jax.ShapeDtypeStruct(shape, each)  # type: ignore[no-untyped-call]
        for shape, each in zip(shapes, (kind, kind, jnp.int32), strict=True)
    ]
    platform = "cuda" if multiprocessors else "cpu"
    try:
        return str(jax.jit(part).trace(*types).lower(lowering_platforms=(platform,)).as_text())
    except (ImportError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise PlatformError(
            f"JAX's kernel of ragged products cannot be lowered for operands of {shapes}: {error}",
            remedy='plan with rewrites="none", which leaves ragged products to the compiler',
        ) from error


def _multiply(rows: Any, matrices: Any, sizes: Any, multiprocessors: int, *, transposed: bool) -> Any:
    blocks, block, _ = rows.shape
    flat = rows.reshape(blocks * block, -1)
    if multiprocessors:
        columns = matrices.shape[1 if transposed else 2]
        product = _kernel("ragged_dot_mgpu", "ragged_dot", multiprocessors)(
            flat, matrices, group_sizes=sizes, transpose_rhs=transposed, **_blocks(columns)
        )
        is_in_group = jnp.arange(len(flat))[:, None] < sizes.sum()
        product = jnp.where(is_in_group, product, jnp.zeros((), product.dtype))
    else:
        product = jax.lax.ragged_dot(flat, matrices.swapaxes(1, 2) if transposed else matrices, sizes)
    return product.reshape(blocks, block, -1)


def _sum(rows: Any, others: Any, sizes: Any, multiprocessors: int) -> Any:
    left, right = (each.reshape(-1, each.shape[-1]) for each in (rows, others))
    if not multiprocessors:
        return jax.lax.ragged_dot_general(left, right, sizes, _WEIGHTS)
    kernel = _kernel("transposed_ragged_dot_mgpu", "transposed_ragged_dot", multiprocessors)
    return kernel(left, right, group_sizes=sizes, **_blocks(right.shape[1]))


def _of_blocks(product: str, rows: Any, other: Any, sizes: Any, multiprocessors: int) -> Any:
    """A product of all blocks at once, each with its own copy of its groups' matrices; gradients are summed over r."""
    replicas, experts, groups = sizes.shape
    length = rows.shape[2]
    filled = sizes.at[..., -1].add(length - sizes.sum(-1)).reshape(-1)
    flat = rows.reshape(1, -1, rows.shape[-1])
    if product == "weights":
        sums = _PRODUCTS[product](flat, other.reshape(1, -1, other.shape[-1]), filled, multiprocessors)
        sums = sums.reshape(replicas, experts, groups, *sums.shape[1:])
        return sums[0] if replicas == 1 else sums.astype(jnp.float32).sum(0).astype(rows.dtype)
    matrices = jnp.broadcast_to(other, (replicas, *other.shape)).reshape(-1, *other.shape[2:])
    product_rows = _PRODUCTS[product](flat, matrices, filled, multiprocessors)
    product_rows = product_rows.reshape(replicas, experts, length, -1)
    is_in_group = jnp.arange(length)[:, None] < sizes.sum(-1)[..., None, None]
    return jnp.where(is_in_group, product_rows, jnp.zeros((), product_rows.dtype))


def _blocks(columns: int) -> dict[str, int]:
    """The kernel's blocks. columns: of the result, which blocks go along before they go on to other rows."""
    across = next(count for count in RAGGED_COLUMNS if columns // SIDE % count == 0)
    blocks = {"block_m": SIDE, "block_n": SIDE, "block_k": DEPTH}
    return blocks | {"max_concurrent_steps": RAGGED_STEPS, "grid_block_n": across}


def _kernel(module: str, name: str, multiprocessors: int) -> Callable[..., Any]:
    """JAX's function, which asks `jax.devices()[0]` for its multiprocessors: the devices that it is lowered for are
    others."""
    function = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    names = {**function.__globals__, "jax": _JaxOfDevices(multiprocessors)}
    own = FunctionType(function.__code__, names, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


class _JaxOfDevices:
    """The module `jax`, whose one device has this many multiprocessors."""

    def __init__(self, multiprocessors: int) -> None:
        self.core_count = multiprocessors

    def devices(self) -> list[_JaxOfDevices]:
        return [self]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


_PRODUCTS: dict[str, Callable[..., Any]] = {
    "rows": partial(_multiply, transposed=False),
    "rows, transposed": partial(_multiply, transposed=True),
    "weights": _sum,
}
