"""Factor combinations that XLA computes wrongly, or with unnecessary data movement.

Each entry was found by brute force on small shapes and is pinned by a test
(tests/planner/rules/test_xla_bugs.py). It may be removed only once that test fails: XLA then fixed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor
from shardwright.plans.shardings import Mesh

#: Opcodes with denied combinations.
XLA_BUG_OPCODES = frozenset({"convolution", "gather", "scatter"})

_Defect = Callable[[Instruction, list[Factor], bool], bool]


def find_xla_bug(instruction: Instruction, assignment: Mapping[str, Factor | None], mesh: Mesh) -> str | None:
    """XLA's bug on `assignment` (mesh axis → factor) of `instruction` on `mesh`; None without one.

    An axis missing in the assignment is idle, like one with None.
    """
    if instruction.opcode not in XLA_BUG_OPCODES:
        return None
    if instruction.opcode != "convolution":
        return _LOOKUP_DEFECT if _is_moved_lookup(assignment, mesh) else None
    factors = [factor for factor in assignment.values() if factor is not None]
    idle = any(axis.size > 1 and assignment.get(axis.name) is None for axis in mesh.axes)
    for is_defect, reason in _CONVOLUTION_DEFECTS:
        if is_defect(instruction, factors, idle):
            return reason
    return None


_LOOKUP_DEFECT = (
    "XLA moves a lookup's whole results between devices where its table is split by what is looked up, its indices are "
    "split too, and the first mesh axis is idle"
)


def _is_moved_lookup(assignment: Mapping[str, Factor | None], mesh: Mesh) -> bool:
    """Whether one axis splits only the tables, by the looked-up dimension, and another the indices without the tables.

    XLA groups the devices by one of the two, and numbers them in a different order from the other's.
    """
    factors = [factor for factor in assignment.values() if factor is not None]
    first = next((axis.name for axis in mesh.axes if axis.size > 1), "")
    return assignment.get(first) is None and any(map(_splits_tables, factors)) and any(map(_splits_indices, factors))


def _splits_tables(factor: Factor) -> bool:
    tables = len(factor.operands) // 2
    is_gather = len(factor.operands) == 2  # the results of a scatter are its tables
    beside = (*factor.operands[tables:], *(factor.results if is_gather else ()))
    return factor.operands[0] is not None and all(dim is None for dim in beside)


def _splits_indices(factor: Factor) -> bool:
    return factor.operands[0] is None and factor.operands[len(factor.operands) // 2] is not None


def _is_image_sum_bug(instruction: Instruction, factors: list[Factor], idle: bool) -> bool:
    """Right only when every axis sums, too."""
    summed = any(factor.contracted and factor.halo for factor in factors)
    return summed and (idle or not all(factor.contracted for factor in factors))


def _is_image_feature_bug(instruction: Instruction, factors: list[Factor], idle: bool) -> bool:
    dims, window = instruction.get("dim_labels"), instruction.get("window")
    if window is None:
        return False
    wide = [dim for dim, size in zip(dims.input_spatial, window.sizes, strict=True) if size > 1]
    split = any(factor.operands[0] in wide and not factor.contracted for factor in factors)
    return split and any(factor.operands[1] == dims.kernel_output_feature for factor in factors)


_CONVOLUTION_DEFECTS: tuple[tuple[_Defect, str], ...] = (
    (
        _is_image_sum_bug,
        "XLA multiplies a kernel gradient summed over a split image by the size of any axis that does not sum",
    ),
    (
        _is_image_feature_bug,
        "XLA mixes up the devices of a convolution split by image dimensions and by output features",
    ),
)
