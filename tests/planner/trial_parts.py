"""What programs that try many single instructions on XLA side by side are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.hlo import Attribute, Computation, Instruction, Module, TupleShape


def copied_regions(
    label: str, original: Instruction
) -> tuple[dict[str, tuple[Computation, ...]], dict[str, Attribute]]:
    """Copies of the regions that an instruction applies, under names of their own, and its attributes naming them."""
    attributes = {n: a for n, a in original.attributes.items() if n not in ("metadata", "sharding")}
    called = {}
    for name, computations in original.called.items():
        called[name] = tuple(_copy(c, f"case{label}_{name}_{i}") for i, c in enumerate(computations))
        attributes[name] = Attribute(name, called[name][0].name, called[name][0].name)
    return called, attributes


def trials_module(
    regions: Sequence[Computation],
    entry: Sequence[Instruction],
    parameters: Sequence[Instruction],
    outputs: Sequence[Instruction],
) -> Module:
    """The program that computes all of `entry` and hands out `outputs`."""
    shape = TupleShape(tuple(output.shape for output in outputs))
    root = Instruction(name="root", opcode="tuple", shape=shape, operands=tuple(outputs), is_root=True)
    main = Computation("main", [*entry, root], root, tuple(parameters), is_entry=True)
    return Module("trials", {}, [*regions, main], main)


def relative_error(expected: np.ndarray, actual: np.ndarray) -> float:
    """The largest difference over the largest number wanted; infinity where integers or what is not finite differ."""
    if expected.dtype.name == "bfloat16":
        expected, actual = expected.astype(np.float32), actual.astype(np.float32)
    if not np.issubdtype(expected.dtype, np.inexact):
        return 0.0 if np.array_equal(expected, actual) else np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    return float(np.abs(expected[finite] - actual[finite]).max() / max(np.abs(expected[finite]).max(), 1e-6))


def _copy(region: Computation, name: str) -> Computation:
    copies: dict[Instruction, Instruction] = {}
    for old in region:
        copies[old] = Instruction(
            name=f"{name}.{old.name}", opcode=old.opcode, shape=old.shape,
            operands=tuple(copies[operand] for operand in old.operands), payload=old.payload,
            attributes={n: a for n, a in old.attributes.items() if n != "metadata"},
            index=old.index, is_root=old.is_root,
        )  # fmt: skip
    return Computation(name, list(copies.values()), copies[region.root], tuple(copies[p] for p in region.parameters))
