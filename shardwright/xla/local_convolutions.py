"""Grouped convolutions as devices compute them part by part (`manual_computation`).

XLA:CPU and XLA:GPU gather the images of a convolution of several groups with several input features each, and
multiply the sum of a convolution with groups of its batch (a grouped kernel's gradient) by the size of an idle mesh
axis. A device's part of either is a convolution of the groups that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import private

_FEATURE_GROUPS, _BATCH_GROUPS = "feature_group_count", "batch_group_count"


def is_gathered_whole(convolution: Any) -> bool:
    """Whether XLA itself splits a convolution badly: one of groups, unless each input feature is a group of its own."""
    numbers = _dimensions(convolution)
    input_features = convolution.operands[0].type.shape[numbers.input_feature_dimension]
    is_grouped = 1 < convolution.attributes[_FEATURE_GROUPS].value < input_features
    return is_grouped or bool(convolution.attributes[_BATCH_GROUPS].value > 1)


def local_groups(convolution: Any, used: Sequence[TensorSharding], mesh: Mesh) -> dict[str, Any]:
    """The counts of groups that one device has, by attribute. used: the layouts of image and kernel."""
    numbers = _dimensions(convolution)
    dims = used[0].dims
    by_source = (
        (_FEATURE_GROUPS, numbers.input_feature_dimension),
        (_BATCH_GROUPS, numbers.input_batch_dimension),
    )
    counts = {}
    for name, dim in by_source:
        attribute = convolution.attributes[name]
        if attribute.value > 1:
            counts[name] = private.ir().IntegerAttr.get(attribute.type, attribute.value // mesh.size(dims[dim]))
    return counts


def _dimensions(convolution: Any) -> Any:
    return private.dialect("stablehlo").ConvDimensionNumbers(convolution.attributes["dimension_numbers"])
