"""Batch normalization becomes sums and elementwise instructions: a form XLA can split.

TensorFlow and PyTorch lower their layers to `batch-norm-training`, `-grad` and `-inference`. XLA gathers their arrays
along every dimension and computes them on every device; it expands them only after partitioning. Expanded before, the
batch (and an image) splits at the cost of all-reduced sums of one number a feature, and the features split at none.

The arithmetic is that of XLA's `BatchNormExpander`
(https://github.com/openxla/xla/blob/main/xla/service/batchnorm_expander.cc).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, TupleShape
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import InstructionWriter, reduction_region, rewrite_instructions

_FLOATS = frozenset({"bf16", "f16", "f32", "f64"})


def expand_batch_norms(module: Module) -> Module:
    """`module` without batch normalizations; `module` itself without any.

    Unchanged: those of several element types, with XLA's own roundings, and of dynamic sizes. A normalization's result,
    or the tuple of its results, has its name.
    """
    return rewrite_instructions(module, _can_expand, lambda *arguments: _Normalization(*arguments).write())


def _can_expand(instruction: Instruction) -> bool:
    if instruction.opcode not in _PARTS:
        return False
    leaves = [leaf for value in (*instruction.operands, instruction) for leaf in value.shape.leaves]
    kinds = {leaf.element_type for leaf in leaves}
    return len(kinds) == 1 and kinds <= _FLOATS and not any(any(leaf.dynamic) for leaf in leaves)


class _Normalization:
    """Expands one normalization, and makes its result of the new instructions.

    regions: the sums shared by a module's normalizations, by element type.
    """

    def __init__(self, norm: Instruction, names: edit.Names, regions: dict[str, Computation]) -> None:
        self._norm = norm
        self._writer = InstructionWriter(norm, names)
        array = norm.operands[0].shape.leaves[0]
        self._type, self._dims = array.element_type, array.dimensions
        self._feature = norm.get("feature_index")
        self._summed = tuple(dim for dim in range(len(self._dims)) if dim != self._feature)
        self._count = prod(self._dims[dim] for dim in self._summed)
        if self._type not in regions:
            regions[self._type] = reduction_region(names.like("sum", self._type), "add", self._type)
        self._region = regions[self._type]

    def write(self) -> list[Instruction]:
        """The new instructions behind the result, in order."""
        results = _PARTS[self._norm.opcode](self, *self._norm.operands)
        if isinstance(self._norm.shape, TupleShape):
            self._norm.opcode, self._norm.operands = "tuple", results
        else:  # the last instruction takes the normalization's name
            (last,) = results
            self._norm.opcode, self._norm.operands = last.opcode, last.operands
            self._writer.written.remove(last)
        gone = ("epsilon", "feature_index")
        self._norm.attributes = {
            name: instruction for name, instruction in self._norm.attributes.items() if name not in gone
        }
        return [edit.check_consistency(instruction) for instruction in self._writer.written]

    def training(self, x: Instruction, scale: Instruction, offset: Instruction) -> tuple[Instruction, ...]:
        """(the normalized array, mean, variance): variance is the mean of squares without the square of the mean."""
        add = self._writer.elementwise
        mean = self._per_feature(self._sum(x))
        squares = self._per_feature(self._sum(add("multiply", x, x)))
        variance = add("subtract", squares, add("multiply", mean, mean))
        centred = add("subtract", x, self._spread(mean))
        normalized = add("multiply", centred, self._spread(self._inverse_deviation(variance)))
        scaled = add("multiply", normalized, self._spread(scale))
        return add("add", scaled, self._spread(offset)), mean, variance

    def inference(
        self, x: Instruction, scale: Instruction, offset: Instruction, mean: Instruction, variance: Instruction
    ) -> tuple[Instruction, ...]:
        """One product and one sum an element."""
        add = self._writer.elementwise
        factor = add("multiply", scale, self._inverse_deviation(variance))
        shift = add("subtract", offset, add("multiply", mean, factor))
        return (add("add", add("multiply", x, self._spread(factor)), self._spread(shift)),)

    def gradient(
        self, x: Instruction, scale: Instruction, mean: Instruction, variance: Instruction, cotangent: Instruction
    ) -> tuple[Instruction, ...]:
        """(gradient of the array, of scale, of offset), of n elements a feature:
        scale / deviation / n · (n · cotangent − Σ cotangent − centred · Σ (cotangent · centred) / (variance + ε))."""
        add = self._writer.elementwise
        inverse = self._inverse_deviation(variance)
        centred = add("subtract", x, self._spread(mean))
        of_offset = self._sum(cotangent)
        along = self._sum(add("multiply", cotangent, centred))
        of_scale = add("multiply", along, inverse)
        count = self._spread(self._number(self._count), whole=True)
        pulled = add("multiply", self._spread(along), centred)
        pulled = add("divide", pulled, self._spread(self._above_zero(variance)))
        less = add("subtract", add("multiply", count, cotangent), self._spread(of_offset))
        factor = add("divide", add("multiply", scale, inverse), self._of_features(self._number(self._count)))
        return add("multiply", self._spread(factor), add("subtract", less, pulled)), of_scale, of_offset

    def _inverse_deviation(self, variance: Instruction) -> Instruction:
        return self._writer.elementwise("rsqrt", self._above_zero(variance))

    def _above_zero(self, variance: Instruction) -> Instruction:
        epsilon = self._of_features(self._number(self._norm.get("epsilon")))
        return self._writer.elementwise("add", variance, epsilon)

    def _per_feature(self, total: Instruction) -> Instruction:
        """The mean of a feature from its sum."""
        return self._writer.elementwise("divide", total, self._of_features(self._number(self._count)))

    def _sum(self, array: Instruction) -> Instruction:
        shape = ArrayShape(self._type, (self._dims[self._feature],))
        return self._writer.reduce(shape, self._region, self._summed, array, self._number(0))

    def _number(self, value: float) -> Instruction:
        return self._writer.constant(self._type, value)

    def _of_features(self, scalar: Instruction) -> Instruction:
        return self._writer.spread(scalar, (self._dims[self._feature],), ())

    def _spread(self, value: Instruction, *, whole: bool = False) -> Instruction:
        """One number a feature, or a single one for the whole array, over all elements."""
        return self._writer.spread(value, self._dims, () if whole else (self._feature,))


_PARTS: dict[str, Callable[..., tuple[Instruction, ...]]] = {
    "batch-norm-training": _Normalization.training,
    "batch-norm-inference": _Normalization.inference,
    "batch-norm-grad": _Normalization.gradient,
}
