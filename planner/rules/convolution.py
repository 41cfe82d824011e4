"""Convolutions: batch and features; where the image is split neighbours would have to trade borders."""

from __future__ import annotations

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor, OpRule, factor, rule, strategy_rule
from shardwright.planner.rules.reduction import spans


@strategy_rule("convolution")
def convolution(instruction: Instruction) -> OpRule:
    """`n i s, i o -> n o s`: batch, output features, and input features (summed), where nothing is grouped."""
    dims = instruction.get("dim_labels")
    feature_groups = instruction.get("feature_group_count", 1)
    batch_groups = instruction.get("batch_group_count", 1)
    batch = ({0: dims.input_batch}, {0: dims.output_batch})
    output_feature = ({1: dims.kernel_output_feature}, {0: dims.output_feature})
    input_feature = {0: dims.input_feature, 1: dims.kernel_input_feature}
    factors: list[Factor | None] = []
    if batch_groups == 1:
        factors.append(factor(instruction, "n", *batch))
    if batch_groups == 1 and feature_groups == 1:
        factors.append(factor(instruction, "o", *output_feature))
    if feature_groups == 1:
        factors.append(factor(instruction, "i", input_feature, {}, reduction="add"))
    factors += _spatial(instruction)
    return rule(factors, _reason(feature_groups, batch_groups))


def _spatial(instruction: Instruction) -> list[Factor | None]:
    """Image dimensions along which the window is a single element: `1x1` kernels pass them through."""
    dims, window = instruction.get("dim_labels"), instruction.get("window")
    return [
        factor(instruction, f"s{i}", {0: source}, {0: target})
        for i, (source, target) in enumerate(zip(dims.input_spatial, dims.output_spatial, strict=True))
        if not spans(window, i)
    ]


def _reason(feature_groups: int, batch_groups: int) -> str:
    if feature_groups > 1 or batch_groups > 1:
        return "XLA gathers grouped features whole; image dimensions under a window stay whole"
    return "image dimensions under a window stay whole"
