"""Combinations of legal factors that XLA is known to compute wrongly.

Each entry was found by brute force on small shapes and is pinned by a test that fails once XLA mends it
(tests/planner/rules/test_denied.py); only then may it go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor
from shardwright.plans import Mesh

_Defect = Callable[[Instruction, list[Factor], bool], bool]


def denied(instruction: Instruction, assignment: Mapping[str, Factor | None], mesh: Mesh) -> str | None:
    """Why XLA computes `instruction` wrongly with `assignment` (mesh axis → factor) on `mesh`; None if it does not.

    An axis that the assignment leaves out is idle, as one that it gives None.
    """
    if instruction.opcode != "convolution":
        return None
    taken = [factor for factor in assignment.values() if factor is not None]
    idle = any(axis.size > 1 and assignment.get(axis.name) is None for axis in mesh.axes)
    for is_defect, reason in _CONVOLUTION_DEFECTS:
        if is_defect(instruction, taken, idle):
            return reason
    return None


def _grouped_sum_beside_idle_axis(instruction: Instruction, taken: list[Factor], idle: bool) -> bool:
    grouped = instruction.get("batch_group_count", 1) > 1
    return grouped and idle and any(factor.contracted for factor in taken)


def _image_sum_beside_other_axis(instruction: Instruction, taken: list[Factor], idle: bool) -> bool:
    """Right only where every axis sums, too."""
    summed = any(factor.contracted and factor.halo for factor in taken)
    return summed and (idle or not all(factor.contracted for factor in taken))


def _image_beside_output_features(instruction: Instruction, taken: list[Factor], idle: bool) -> bool:
    dims, window = instruction.get("dim_labels"), instruction.get("window")
    if window is None:
        return False
    wide = [dim for dim, size in zip(dims.input_spatial, window.sizes, strict=True) if size > 1]
    split = any(factor.operands[0] in wide and not factor.contracted for factor in taken)
    return split and any(factor.operands[1] == dims.kernel_output_feature for factor in taken)


_CONVOLUTION_DEFECTS: tuple[tuple[_Defect, str], ...] = (
    (
        _grouped_sum_beside_idle_axis,
        "XLA multiplies the summed batch of a batch-grouped convolution by the size of an idle mesh axis",
    ),
    (
        _image_sum_beside_other_axis,
        "XLA multiplies a kernel gradient summed over a split image by the size of any axis that does not sum",
    ),
    (
        _image_beside_output_features,
        "XLA mixes up the devices of a convolution split by image dimensions and by output features",
    ),
)
