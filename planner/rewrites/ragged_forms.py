"""Ragged products in the form that takes the devices least time.

    batch      groups of equal sizes by construction: a product of a batch, exactly
    kernel     JAX's kernel, where devices have it (`kernel_ragged_products`)
    tiles      products of tiles of rows, each of one group (`ragged_products`)
    masks      rows once per group, 0 in all but their own (`masked_ragged_products`): what all forms may be written as
    compiler   the product as it is, where the compiler multiplies each row once

Times are those of one device and whole arrays, products by the roofline and whatever is gathered or masked by its
bytes: splitting divides all of them alike.
"""

from __future__ import annotations

from math import prod

import numpy as np

from shardwright.cost import HardwareProfile
from shardwright.cost.ragged import kernel_time_s, ragged_flops, ragged_time_s
from shardwright.hlo import Computation, Instruction, Module
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.whole import UnknownValueError, WholeValues
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.batched_ragged_products import write_batch
from shardwright.planner.rewrites.instruction_writer import rewrite_instructions
from shardwright.planner.rewrites.kernel_ragged_products import kernel_call, write_kernel
from shardwright.planner.rewrites.masked_ragged_products import write_masked
from shardwright.planner.rewrites.ragged_products import can_tile, count_tiles, flops_per_byte, tile_rows, write_tiles


def write_ragged_products(module: Module, profile: HardwareProfile | None) -> Module:
    """`module` with its ragged products in their fastest forms; `module` itself without any.

    profile: of the devices; None: unknown ones, whose compiler and kernels count for nothing.
    """
    products = [each for each in module.instructions() if each.opcode == "ragged-dot"]
    if not products:
        return module
    values = WholeValues(Flow(module))
    forms = {
        _key(product): "batch" if _has_equal_groups(product, values) else choose_form(product, profile)
        for product in products
    }

    def write(product: Instruction, names: edit.Names, regions: dict[str, Computation]) -> list[Instruction]:
        form = forms[_key(product)]
        if form == "batch":
            return write_batch(product, names)
        if form == "kernel" and (call := kernel_call(product)) is not None:
            return write_kernel(product, call, names, regions)
        if form == "tiles":
            return write_tiles(product, names, regions, profile)
        return write_masked(product, names, regions)

    return rewrite_instructions(module, lambda each: forms.get(_key(each), "compiler") != "compiler", write)


def _key(product: Instruction) -> tuple[str, int]:
    """What a product has in common with its copy in a module that is rewritten."""
    return product.name, product.line


def choose_form(product: Instruction, profile: HardwareProfile | None) -> str:
    """The fastest form of a product of unequal groups."""
    times = form_times_s(product, profile)
    return min(times, key=lambda form: times[form])


def form_times_s(product: Instruction, profile: HardwareProfile | None) -> dict[str, float]:
    """Seconds of each form that a product may have, the preferred first where two take as long; without a profile, in
    units of the time of a byte."""
    shapes = [operand.shape.leaves[0].dimensions for operand in product.operands]
    results = [leaf.dimensions for leaf in product.shape.leaves]
    memory_s = _bytes(*product.operands, product) * _byte_s(profile)
    times: dict[str, float] = {}
    if profile is not None and profile.ragged is not None:
        call = kernel_call(product) if can_tile(product) and profile.ragged.kernel_efficiency else None
        if call is not None:
            kind = product.operands[0].shape.leaves[0].element_type
            times["kernel"] = kernel_time_s(call, kind, shapes, results, memory_s, profile) + _start_s(2, profile)
        masks = profile.ragged.masks_weights if _sums_rows(product) else profile.ragged.masks_rows
        if not masks:
            times["compiler"] = ragged_time_s(product, shapes, results, memory_s, profile)
    if can_tile(product):
        times["tiles"] = _tiles_time_s(product, profile)
    times["masks"] = _masks_time_s(product, profile)
    return times


def _tiles_time_s(product: Instruction, profile: HardwareProfile | None) -> float:
    """Rows into tiles and matrices to them, products, and results back to the rows, or summed by group."""
    lhs, _, sizes = (operand.shape.leaves[0] for operand in product.operands)
    (ragged,) = product.get("lhs_ragged_dims")
    rows, groups = lhs.dimensions[ragged], sizes.dimensions[0]
    tile = tile_rows(rows, groups, flops_per_byte(profile, lhs.element_type))
    tiles = count_tiles(rows, groups, tile)
    gathered: float = tiles * tile / max(rows, 1)  # rows in tiles for each row
    if _sums_rows(product):
        sums = 4 * tiles * prod(product.shape.leaves[0].dimensions[1:])
        moved = 3 * gathered * _bytes(*product.operands[:2]) + 3 * sums
    else:
        matrices = tiles / max(groups, 1)
        moved = 3 * gathered * _bytes(product.operands[0]) + 3 * matrices * _bytes(product.operands[1])
        moved += (gathered + 2) * _bytes(product)
    return _product_s(product, gathered, profile) + moved * _byte_s(profile) + _start_s(8, profile)


def _masks_time_s(product: Instruction, profile: HardwareProfile | None) -> float:
    """Rows written once per group, read again, and multiplied by all groups' matrices."""
    (ragged,) = product.get("lhs_ragged_dims")
    if ragged in product.get("lhs_batch_dims", ()):
        return _product_s(product, 1.0, profile)  # without groups: JAX leaves the sizes out
    groups: int = product.operands[2].shape.leaves[0].dimensions[-1]
    masked = product.operands[: 2 if _sums_rows(product) else 1]
    moved = (2.0 * groups + 1) * _bytes(*masked)
    return _product_s(product, groups, profile) + moved * _byte_s(profile) + _start_s(3, profile)


def _product_s(product: Instruction, times: float, profile: HardwareProfile | None) -> float:
    """Seconds of a product of some times the operations that its rows need."""
    shapes = [operand.shape.leaves[0].dimensions for operand in product.operands]
    work = times * ragged_flops(product, shapes, [product.shape.leaves[0].dimensions])
    kind = product.operands[0].shape.leaves[0].element_type
    return work / flops_per_byte(profile, kind) * _byte_s(profile)


def _start_s(kernels: int, profile: HardwareProfile | None) -> float:
    """Of kernels that work out which row is whose, gather and multiply, besides their work."""
    return 0.0 if profile is None else kernels * profile.launch_s


def _byte_s(profile: HardwareProfile | None) -> float:
    return 1.0 if profile is None else 1.0 / profile.memory_bandwidth_bytes_per_s


def _bytes(*values: Instruction) -> float:
    leaves = [leaf for value in values for leaf in value.shape.leaves]
    return sum(prod(leaf.dimensions) * ELEMENT_BITS[leaf.element_type] / 8 for leaf in leaves)


def _sums_rows(product: Instruction) -> bool:
    """Whether it is a gradient of matrices."""
    return bool(set(product.get("lhs_ragged_dims")) & set(product.get("lhs_contracting_dims", ())))


def _has_equal_groups(product: Instruction, values: WholeValues) -> bool:
    """Whether the program's own constants say that all groups have the same number of rows, and no row has none."""
    if not can_tile(product):
        return False
    try:
        sizes = values.value(product.operands[2])
    except UnknownValueError:
        return False
    (ragged,) = product.get("lhs_ragged_dims")
    rows = product.operands[0].shape.leaves[0].dimensions[ragged]
    return bool(np.all(sizes == sizes[0])) and int(sizes.sum()) == rows
