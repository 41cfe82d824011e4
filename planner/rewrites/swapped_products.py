"""A product that is only read transposed is written as the product of its operands in the other order.

JAX makes the gradient of a weight so: `(dyᵀ x)ᵀ` for `xᵀ dy`. XLA swaps the operands, too, unless something stands
between; a plan says between them how the product lies, and XLA:GPU then turns around dy, of which it has what `dy wᵀ`
reads.
"""

from __future__ import annotations

from collections import Counter

from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.rewrites import edit

_PLAIN = frozenset({"lhs_contracting_dims", "rhs_contracting_dims", "metadata"})


def swap_products(module: Module) -> Module:
    """`module` with such products swapped, each under its name; the same one where there are none."""
    swapped = {
        turned: turned.operands[0]
        for computation in module.computations
        for turned in _find_transposed_products(computation)
    }
    if not swapped:
        return module
    gone, made = set(swapped.values()), dict[Instruction, Instruction]()
    computations: dict[Computation, Computation] = {}
    for computation in module.computations:
        out = []
        for old in computation:
            if old in gone:
                continue
            if old in swapped:
                made[old] = _swap(swapped[old], old, made)
            else:
                called = {
                    name: tuple(computations.get(callee, callee) for callee in callees)
                    for name, callees in old.called.items()
                }
                made[old] = edit.copy_of(old, [made[operand] for operand in old.operands], called=called)
            out.append(made[old])
        computations[computation] = edit.computation_of(computation, out, made[computation.root])
    return edit.module_of(module, list(computations.values()))


def _find_transposed_products(computation: Computation) -> list[Instruction]:
    """Transposes after which the second operand's dimensions come first, of products that nothing else reads."""
    readers = Counter(operand for instruction in computation for operand in instruction.operands)
    return [each for each in computation if each.opcode == "transpose" and _swaps(each, readers)]


def _swaps(transpose: Instruction, readers: Counter[Instruction]) -> bool:
    (dot,) = transpose.operands
    is_plain = dot.opcode == "dot" and dot.attributes.keys() <= _PLAIN and len(dot.operands) == 2
    if not is_plain or readers[dot] > 1 or dot.is_root or transpose.is_root:
        return False
    left, right = (operand.shape.leaves[0] for operand in dot.operands)
    rank = dot.shape.leaves[0].rank
    first = left.rank - len(dot.get("lhs_contracting_dims", ()))
    order = (*range(first, rank), *range(first))
    return left.element_type == right.element_type and tuple(transpose.get("dimensions", ())) == order


def _swap(dot: Instruction, transpose: Instruction, made: dict[Instruction, Instruction]) -> Instruction:
    attributes = dict(dot.attributes)
    for side, other in (("lhs", "rhs"), ("rhs", "lhs")):
        name = f"{side}_contracting_dims"
        attributes[name] = edit.int_list(name, dot.get(f"{other}_contracting_dims", ()))
    operands = [made[operand] for operand in reversed(dot.operands)]
    (leaf,) = transpose.shape.leaves
    shape = type(leaf)(leaf.element_type, leaf.dimensions)
    return edit.check_consistency(edit.copy_of(dot, operands, shape=shape, attributes=attributes))
