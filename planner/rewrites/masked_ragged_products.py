"""Ragged products of every form as products of rows that are masked by group.

    x'[g, m, …] = x[m, …] where m is a row of group g, else 0          y = Σ_g x'[g] · w[g],   dw[g] = x'[g]ᵀ · y'[g]

What `jax.lax.ragged_dot_general` says of all its dimensions: G times the work and the rows, ordinary instructions.
Along a ragged batch dimension it is a product without groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.hlo import Computation, Instruction
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.group_integers import GroupIntegers
from shardwright.planner.rewrites.instruction_writer import InstructionWriter


def write_masked(product: Instruction, names: edit.Names, regions: dict[str, Computation]) -> list[Instruction]:
    """The instructions ahead of a product that becomes an ordinary one. regions: see `GroupIntegers`."""
    return _Masked(product, names, regions).write()


class _Masked(GroupIntegers):
    """Writes one product."""

    def __init__(self, product: Instruction, names: edit.Names, regions: dict[str, Computation]) -> None:
        super().__init__(InstructionWriter(product, names), regions)
        self._product = product
        (self._ragged,) = product.get("lhs_ragged_dims")
        self._batch = tuple(product.get("lhs_batch_dims", ())), tuple(product.get("rhs_batch_dims", ()))
        self._summed = tuple(product.get("lhs_contracting_dims", ())), tuple(product.get("rhs_contracting_dims", ()))

    def write(self) -> list[Instruction]:
        lhs, rhs, _ = self._product.operands
        batch, summed = self._batch, self._summed
        if self._ragged in batch[0]:
            self._become_dot((lhs, rhs), batch, summed)
        elif self._ragged in summed[0]:
            other = summed[1][summed[0].index(self._ragged)]
            masked = self._mask(lhs, self._ragged, 0), self._mask(rhs, other, 1)
            own = _moved(batch, right=True)
            self._become_dot(masked, ((0, *own[0]), (0, *own[1])), _moved(summed, right=True))
        else:
            (group,) = self._product.get("rhs_group_dims")
            left = _moved(summed, right=False)
            moved = _moved(batch, right=False)
            self._become_dot((self._mask(lhs, self._ragged, 0), rhs), moved, ((*left[0], 0), (*left[1], group)))
        return self.writer.written

    def _mask(self, rows: Instruction, dim: int, side: int) -> Instruction:
        """[groups, …]: an operand's rows along `dim`, 0 in all groups but their own."""
        leaf = rows.shape.leaves[0]
        sizes = self.to_integers(self._product.operands[2])
        prefix = self._prefix(leaf.rank, dim, side) if sizes.shape.leaves[0].rank > 1 else []
        ends = self.sum_up_to(sizes)
        starts = self.binary("subtract", ends, sizes)
        groups = ends.shape.leaves[0].dimensions[-1]
        own = sorted([*prefix, dim])
        dims = (groups, *(leaf.dimensions[each] for each in own))
        along = [0, *(1 + own.index(each) for each in prefix)]
        first, behind = (self.writer.spread(self._groups_first(each), dims, along) for each in (starts, ends))
        place = self.iota(dims, 1 + own.index(dim))
        inside = self.writer.array(
            "and", "pred", dims, self.compare(first, place, "LE"), self.compare(place, behind, "LT")
        )
        whole = (groups, *leaf.dimensions)
        zeros = self.writer.spread(self.writer.constant(leaf.element_type, 0), whole, [])
        inside = self.writer.spread(inside, whole, [0, *(each + 1 for each in own)])
        spread = self.writer.spread(rows, whole, [*range(1, len(whole))])
        return self.writer.array("select", leaf.element_type, whole, inside, spread, zeros)

    def _prefix(self, rank: int, dim: int, side: int) -> list[int]:
        """The operand's dimensions that sizes have ahead of the groups, in their order."""
        batch, summed = self._batch[side], self._summed[side]
        if dim in summed:
            return [*batch, *summed[: summed.index(dim)]]
        return [*batch, *(each for each in range(dim) if each not in (*batch, *summed))]

    def _groups_first(self, values: Instruction) -> Instruction:
        leaf = values.shape.leaves[0]
        if leaf.rank == 1:
            return values
        order = (leaf.rank - 1, *range(leaf.rank - 1))
        return self.writer.array(
            "transpose", "s32", tuple(leaf.dimensions[each] for each in order), values, dimensions=_list(order)
        )

    def _become_dot(
        self,
        operands: tuple[Instruction, Instruction],
        batch: tuple[Sequence[int], Sequence[int]],
        summed: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        product = self._product
        product.opcode, product.operands = "dot", operands
        kept = {name: each for name, each in product.attributes.items() if name in ("metadata", "operand_precision")}
        said = {"lhs_batch_dims": batch[0], "lhs_contracting_dims": summed[0]}
        said |= {"rhs_batch_dims": batch[1], "rhs_contracting_dims": summed[1]}
        product.attributes = {name: edit.attribute(name, _list(dims)) for name, dims in said.items() if dims} | kept


def _moved(dims: tuple[Sequence[int], Sequence[int]], *, right: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions of both operands, behind the groups on the left, and on the right if those have groups too."""
    left, other = dims
    return tuple(dim + 1 for dim in left), tuple(dim + right for dim in other)


def _list(dims: Sequence[int]) -> str:
    return f"{{{','.join(map(str, dims))}}}"
