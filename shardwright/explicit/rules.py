"""Types under a mesh of Explicit axes: what JAX itself makes of one instruction.

JAX is asked, not copied: the operation that an instruction was lowered from is traced on shapes with shardings, over an
abstract mesh, so that the answers are those of the JAX that is installed. No device is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardwright.hlo import ArrayShape, ConvDims, Instruction, Window
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla.jax_shardings import to_partition_spec

#: Operations on elements of one array, or of several of equal dimensions, that JAX merges the shardings of.
_ELEMENTWISE = frozenset([
    "abs", "add", "and", "atan2", "bitcast-convert", "cbrt", "ceil", "clamp", "compare", "complex", "convert",
    "copy", "cosine", "count-leading-zeros", "divide", "erf", "exponential", "exponential-minus-one", "floor",
    "imag", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not",
    "optimization-barrier", "or", "popcnt", "power", "real", "reduce-precision", "remainder",
    "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor",
])  # fmt: skip

Types = tuple[TensorSharding, ...]


class AmbiguousTypeError(Exception):
    """JAX asks for a sharding here: `ShardingTypeError`, which is no public name of JAX's."""


class TypeRules:
    """Types of results over one mesh, remembered by instruction and types of operands."""

    def __init__(self, mesh: Mesh) -> None:
        sizes, names = tuple(mesh.sizes.values()), tuple(mesh.sizes)
        self._mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))
        self._answers: dict[Any, TensorSharding | None] = {}

    def result(self, instruction: Instruction, operands: Sequence[TensorSharding]) -> TensorSharding | None:
        """The type of an instruction's one array; None: of an operation that no rule is asked about.

        Raises AmbiguousTypeError where JAX wants to be told.
        """
        opcode, shape = instruction.opcode, instruction.shape
        shapes = [operand.shape for operand in instruction.operands if isinstance(operand.shape, ArrayShape)]
        if not isinstance(shape, ArrayShape) or len(shapes) < len(instruction.operands):
            return None
        if opcode in _ELEMENTWISE:
            operation: Callable[..., Any] | None = _merge
            pairs = [(s, t) for s, t in zip(shapes, operands, strict=True) if s.dimensions == shape.dimensions]
        else:
            operation = _OPERATIONS[opcode](instruction) if opcode in _OPERATIONS else None
            pairs = list(zip(shapes, operands, strict=True))[: _READ.get(opcode, 1)]
        if operation is None:
            return None
        attributes = tuple(a.text for name, a in instruction.attributes.items() if name != "metadata")
        key = (
            opcode in _ELEMENTWISE or opcode,
            shape.dimensions,
            tuple((s.dimensions, t) for s, t in pairs),
            attributes,
        )
        if key not in self._answers:
            self._answers[key] = self._trace(operation, pairs)
        answer = self._answers[key]
        if answer is None:
            raise AmbiguousTypeError
        return answer

    def _trace(
        self, operation: Callable[..., Any], pairs: Sequence[tuple[ArrayShape, TensorSharding]]
    ) -> TensorSharding | None:
        arrays = [
            jax.ShapeDtypeStruct(shape.dimensions, "float32", sharding=self._sharding(typed))  # type: ignore[no-untyped-call]
            for shape, typed in pairs
        ]
        with jax.sharding.use_abstract_mesh(self._mesh):
            try:
                result = jax.eval_shape(operation, *arrays)
            except Exception:  # what JAX raises here has no public name
                return None
        return _from_spec(result.sharding.spec, len(result.shape))

    def _sharding(self, typed: TensorSharding) -> NamedSharding:
        return NamedSharding(self._mesh, to_partition_spec(typed, len(typed.dims)))


def _from_spec(spec: PartitionSpec, rank: int) -> TensorSharding:
    dims = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]
    return TensorSharding((*dims, *((),) * (rank - len(dims))))


def _merge(first: jax.Array, *others: jax.Array) -> jax.Array:
    for other in others:
        first = lax.add(first, other)
    return first


# ---- the operation that an instruction was, on arrays of any type: only dimensions count --------------


def _dot(instruction: Instruction) -> Callable[..., Any]:
    contracted = instruction.get("lhs_contracting_dims", ()), instruction.get("rhs_contracting_dims", ())
    batch = instruction.get("lhs_batch_dims", ()), instruction.get("rhs_batch_dims", ())
    return lambda a, b: lax.dot_general(a, b, (contracted, batch))


def _gather(instruction: Instruction) -> Callable[..., Any]:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=instruction.get("offset_dims", ()),
        collapsed_slice_dims=instruction.get("collapsed_slice_dims", ()),
        start_index_map=instruction.get("start_index_map", ()),
        operand_batching_dims=instruction.get("operand_batching_dims", ()),
        start_indices_batching_dims=instruction.get("start_indices_batching_dims", ()),
    )
    sizes = instruction.get("slice_sizes")
    return lambda a, i: lax.gather(a, i.astype("int32"), numbers, sizes, mode="promise_in_bounds")


def _reduce(instruction: Instruction) -> Callable[..., Any]:
    return lambda a: lax.reduce_max(a, instruction.get("dimensions"))


def _reshape(instruction: Instruction) -> Callable[..., Any]:
    return lambda a: lax.reshape(a, instruction.shape.leaves[0].dimensions)


def _transpose(instruction: Instruction) -> Callable[..., Any]:
    return lambda a: lax.transpose(a, instruction.get("dimensions"))


def _broadcast(instruction: Instruction) -> Callable[..., Any]:
    dimensions = instruction.shape.leaves[0].dimensions
    return lambda a: lax.broadcast_in_dim(a, dimensions, instruction.get("dimensions", ()))


def _slice(instruction: Instruction) -> Callable[..., Any]:
    starts, limits, strides = zip(*instruction.get("slice"), strict=True)
    return lambda a: lax.slice(a, starts, limits, strides)


def _dynamic_slice(instruction: Instruction) -> Callable[..., Any]:
    sizes = instruction.get("dynamic_slice_sizes")
    return lambda a: lax.dynamic_slice(a, (0,) * len(sizes), sizes)


def _dynamic_update_slice(instruction: Instruction) -> Callable[..., Any]:
    return lambda a, b: lax.dynamic_update_slice(a, b, (0,) * a.ndim)


def _concatenate(instruction: Instruction) -> Callable[..., Any]:
    (dimension,) = instruction.get("dimensions")
    return lambda *arrays: lax.concatenate(arrays, dimension)


def _pad(instruction: Instruction) -> Callable[..., Any]:
    return lambda a: lax.pad(a, jax.numpy.float32(0), instruction.get("padding"))


def _reverse(instruction: Instruction) -> Callable[..., Any]:
    return lambda a: lax.rev(a, instruction.get("dimensions"))


def _convolution(instruction: Instruction) -> Callable[..., Any]:
    window: Window = instruction.get("window")
    dims: ConvDims = instruction.get("dim_labels")
    numbers = lax.ConvDimensionNumbers(
        (dims.input_batch, dims.input_feature, *dims.input_spatial),
        (dims.kernel_output_feature, dims.kernel_input_feature, *dims.kernel_spatial),
        (dims.output_batch, dims.output_feature, *dims.output_spatial),
    )
    return lambda a, b: lax.conv_general_dilated(
        a,
        b,
        window.strides,
        tuple(zip(window.padding_low, window.padding_high, strict=True)),
        lhs_dilation=window.lhs_dilation,
        rhs_dilation=window.rhs_dilation,
        dimension_numbers=numbers,
        feature_group_count=instruction.get("feature_group_count", 1),
        batch_group_count=instruction.get("batch_group_count", 1),
    )


_OPERATIONS: dict[str, Callable[[Instruction], Callable[..., Any]]] = {
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "convolution": _convolution,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reduce": _reduce,
    "reshape": _reshape,
    "reverse": _reverse,
    "slice": _slice,
    "transpose": _transpose,
}

#: How many operands of these are arrays that the type depends on; of others the first.
_READ = {"concatenate": 1 << 30, "convolution": 2, "dot": 2, "dynamic-update-slice": 2, "gather": 2}
