"""Convolutions: batch, features, and image dimensions that are not stitched at their borders."""

from __future__ import annotations

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor, OpRule, factor, operand_leaves, rule, strategy_rule
from shardwright.planner.rules.windows import Span, span


@strategy_rule("convolution")
def convolution(instruction: Instruction) -> OpRule:
    """`n i s, i o -> n o s`: batch, output features, input features (summed), image dimensions without borders.

    `g` splits by groups: depthwise (a group per input feature), and groups of the batch, which is what a
    grouped kernel's gradient has; other groups XLA gathers. The gradient of a kernel is a convolution too,
    in which images take the place of input features and the image dimensions are summed.
    """
    dims = instruction.get("dim_labels")
    input_features = operand_leaves(instruction)[0].dimensions[dims.input_feature]
    feature_groups = instruction.get("feature_group_count", 1)
    batch_groups = instruction.get("batch_group_count", 1)
    factors: list[Factor | None] = []
    if batch_groups == 1 and feature_groups in (1, input_features):
        factors.append(factor(instruction, "n", {0: dims.input_batch}, {0: dims.output_batch}))
    if batch_groups == 1 == feature_groups:
        factors.append(factor(instruction, "o", {1: dims.kernel_output_feature}, {0: dims.output_feature}))
    if feature_groups == 1:
        summed = {0: dims.input_feature, 1: dims.kernel_input_feature}
        factors.append(factor(instruction, "i", summed, {}, reduction="add"))
    source = dims.input_batch if batch_groups > 1 else dims.input_feature
    if batch_groups > 1 or feature_groups == input_features > 1:
        split = {0: source, 1: dims.kernel_output_feature}
        factors.append(
            factor(instruction, "g", split, {0: dims.output_feature}, parts=max(batch_groups, feature_groups))
        )
    spatial, left_out = _spatial(instruction)
    grouped = ["XLA gathers what is grouped"] if feature_groups > 1 or batch_groups > 1 else []
    return rule([*factors, *spatial], "; ".join([*grouped, *left_out]))


def _spatial(instruction: Instruction) -> tuple[list[Factor | None], list[str]]:
    """Image dimensions: through a kernel one wide, tiled by patches, or summed by a window over all of it."""
    dims, window = instruction.get("dim_labels"), instruction.get("window")
    sizes = operand_leaves(instruction)[0].dimensions
    factors: list[Factor | None] = []
    left_out = []
    for i, (source, kernel, target) in enumerate(
        zip(dims.input_spatial, dims.kernel_spatial, dims.output_spatial, strict=True)
    ):
        lies = span(window, i, sizes[source])
        if lies in (Span.NONE, Span.TILES):
            factors.append(factor(instruction, f"s{i}", {0: source}, {0: target}))
        elif lies is Span.ALL:
            factors.append(factor(instruction, f"s{i}", {0: source, 1: kernel}, {}, reduction="add"))
        else:
            left_out.append(f"image dimension {i} has borders")
    return factors, left_out
