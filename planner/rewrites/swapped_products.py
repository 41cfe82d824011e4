"""A product read only through a transpose becomes the product of its operands in the other order.

JAX writes the gradient of a weight this way: `(dyᵀ x)ᵀ` for `xᵀ dy`. XLA swaps the operands too, except across an
instruction between the two. A plan puts the product's sharding there; XLA:GPU then transposes dy, already at hand in
the layout of `dy wᵀ`.
"""

from __future__ import annotations

from collections import Counter

from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.rewrites import edit

_PLAIN = frozenset({"lhs_contracting_dims", "rhs_contracting_dims", "metadata"})


def swap_products(module: Module) -> Module:
    """`module` with such products swapped, each under its name; `module` itself without any."""
    swapped = {
        turned: turned.operands[0]
        for computation in module.computations
        for turned in _find_transposed_products(computation)
    }
    if not swapped:
        return module
    gone, copies = set(swapped.values()), dict[Instruction, Instruction]()
    computations: dict[Computation, Computation] = {}
    for computation in module.computations:
        out = []
        for old in computation:
            if old in gone:
                continue
            if old in swapped:
                copies[old] = _swap(swapped[old], old, copies)
            else:
                called = {
                    name: tuple(computations.get(callee, callee) for callee in callees)
                    for name, callees in old.called.items()
                }
                copies[old] = edit.copy_of(old, [copies[operand] for operand in old.operands], called=called)
            out.append(copies[old])
        computations[computation] = edit.computation_of(computation, out, copies[computation.root])
    return edit.module_of(module, list(computations.values()))


def _find_transposed_products(computation: Computation) -> list[Instruction]:
    """Transposes of products without other consumers that put the second operand's dimensions first."""
    readers = Counter(operand for instruction in computation for operand in instruction.operands)
    return [transpose for transpose in computation if transpose.opcode == "transpose" and _swaps(transpose, readers)]


def _swaps(transpose: Instruction, readers: Counter[Instruction]) -> bool:
    (dot,) = transpose.operands
    is_plain = dot.opcode == "dot" and dot.attributes.keys() <= _PLAIN and len(dot.operands) == 2
    if not is_plain or readers[dot] > 1 or dot.is_root or transpose.is_root:
        return False
    lhs, rhs = (operand.shape.leaves[0] for operand in dot.operands)
    rank = dot.shape.leaves[0].rank
    first = lhs.rank - len(dot.get("lhs_contracting_dims", ()))
    order = (*range(first, rank), *range(first))
    return lhs.element_type == rhs.element_type and tuple(transpose.get("dimensions", ())) == order


def _swap(dot: Instruction, transpose: Instruction, copies: dict[Instruction, Instruction]) -> Instruction:
    attributes = dict(dot.attributes)
    for side, other in (("lhs", "rhs"), ("rhs", "lhs")):
        name = f"{side}_contracting_dims"
        attributes[name] = edit.int_list(name, dot.get(f"{other}_contracting_dims", ()))
    operands = [copies[operand] for operand in reversed(dot.operands)]
    (leaf,) = transpose.shape.leaves
    shape = type(leaf)(leaf.element_type, leaf.dimensions)
    return edit.check_consistency(edit.copy_of(dot, operands, shape=shape, attributes=attributes))
