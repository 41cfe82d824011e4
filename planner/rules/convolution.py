"""Convolutions: batch, features, and image dimensions (neighbours exchange borders)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor, OpRule, factor, operand_leaves, rule, strategy_rule
from shardwright.planner.rules.windows import Span, contraction_halo, span, window_halo


@strategy_rule("convolution")
def convolution(instruction: Instruction) -> OpRule:
    """`n i s, i o -> n o s`: batch, output features, input features (summed), image dimensions.

    `g` splits by groups, of features or of the batch (a grouped kernel's gradient). XLA gathers what is grouped, unless
    each input feature is a group of its own: `xla/manual_computation.py` has each device compute its part. The gradient
    of a kernel is a convolution too: images take the place of input features and the image dimensions are summed.
    """
    dims = instruction.get("dim_labels")
    input_features = operand_leaves(instruction)[0].dimensions[dims.input_feature]
    feature_groups = instruction.get("feature_group_count", 1)
    batch_groups = instruction.get("batch_group_count", 1)
    groups = max(batch_groups, feature_groups)
    factors: list[Factor | None] = []
    if batch_groups == 1:
        factors.append(factor(instruction, "n", {0: dims.input_batch}, {0: dims.output_batch}))
    if groups == 1:
        factors.append(factor(instruction, "o", {1: dims.kernel_output_feature}, {0: dims.output_feature}))
    if feature_groups == 1:
        summed = {0: dims.input_feature, 1: dims.kernel_input_feature}
        factors.append(factor(instruction, "i", summed, {}, reduction="add"))
    if groups > 1:
        source = dims.input_batch if batch_groups > 1 else dims.input_feature
        split = {0: source, 1: dims.kernel_output_feature}
        factors.append(factor(instruction, "g", split, {0: dims.output_feature}, parts=groups, may_pad=False))
    is_image = batch_groups == 1 and feature_groups in (1, input_features)
    reason = "features are split by their groups" if groups > 1 else ""
    return rule([*factors, *_spatial(instruction), *_halo_factors(instruction, is_image, feature_groups == 1)], reason)


def _spatial(instruction: Instruction) -> list[Factor | None]:
    """Image dimensions through a kernel one wide, tiled by patches, or summed by a window over all of it."""
    factors: list[Factor | None] = []
    for i, source, tap, target, coverage in _image_dimensions(instruction):
        if coverage is Span.ALL:
            factors.append(factor(instruction, f"s{i}", {0: source, 1: tap}, {}, reduction="add"))
        elif coverage is not Span.BORDERS:
            factors.append(factor(instruction, f"s{i}", {0: source}, {0: target}))
    return factors


def _halo_factors(instruction: Instruction, is_image: bool, is_summed: bool) -> list[Factor | None]:
    """Image dimensions with borders: of the rows read by a block of the result (`is_image`), or of those combined with
    a block of the kernel, summed (`is_summed`), like in a kernel's gradient."""
    window = instruction.get("window")
    image, kernel = (leaf.dimensions for leaf in operand_leaves(instruction))
    result = instruction.shape.leaves[0].dimensions
    factors: list[Factor | None] = []
    for i, source, tap, target, coverage in _image_dimensions(instruction):
        if coverage is not Span.BORDERS:
            continue
        if is_image:
            border = window_halo(window, i, 0, image[source], result[target])
            factors.append(factor(instruction, f"s{i}", {0: source}, {0: target}, halo=(border,)))
        if is_summed and not window.reversal[i] and window.lhs_dilation[i] == 1:
            halo = contraction_halo(window, i, 0, image[source], kernel[tap], result[target])
            factors.append(factor(instruction, f"c{i}", {0: source, 1: tap}, {}, reduction="add", halo=(halo,)))
    return factors


def _image_dimensions(instruction: Instruction) -> Iterator[tuple[int, int, int, int, Span]]:
    """Per image dimension: number, dimension of image, kernel and result, and span of the windows."""
    dims, window = instruction.get("dim_labels"), instruction.get("window")
    image = operand_leaves(instruction)[0].dimensions
    triples = zip(dims.input_spatial, dims.kernel_spatial, dims.output_spatial, strict=True)
    for i, (source, tap, target) in enumerate(triples):
        yield i, source, tap, target, span(window, i, image[source])
