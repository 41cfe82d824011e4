"""Writes the mixtures of a module in blocks: rows go to the blocks of their experts, and come back.

Rows in sorted order are not computed any more. What makes them (a gather by the permutation, a ragged product) becomes
tiles of a block; elementwise and other operations within rows are moved into tiles; what takes them back to pairs or
tokens (a gather by the inverse, a scatter-add by the permutation) becomes a return from tiles. Whatever else reads
sorted rows gets them by way of pairs, and what else is met in sorted order goes by way of pairs into tiles: right, and
dearer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from shardwright.cost import HardwareProfile
from shardwright.hlo import Attribute, Computation, Instruction, Module
from shardwright.planner.attention.elementwise import ELEMENTWISE, OPERATIONS, compare, convert
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.rebuild import live_instructions
from shardwright.planner.mixtures.block_writer import BlockWriter, dims_of, type_of
from shardwright.planner.mixtures.blocks import Blocks
from shardwright.planner.mixtures.exchange import Exchange
from shardwright.planner.mixtures.layouts import choose_layout
from shardwright.planner.mixtures.orders import Order, RowOrders, number_of
from shardwright.planner.mixtures.overflow import Overflow, is_question, sum_counts
from shardwright.planner.mixtures.recognise import Mixture, find_mixtures, is_weights
from shardwright.planner.mixtures.sizes import sizes_of
from shardwright.planner.rewrites import edit

_VIEWS = frozenset({"reshape", "copy", "bitcast"})


def block_mixtures(module: Module, blocks: Blocks | None, profile: HardwareProfile | None) -> Module:
    """`module` with the mixtures that `blocks` divide written in blocks; `module` itself without any.

    A call of `ROWS_OVER` becomes the number of pairs of all mixtures that were over the bound.
    profile: of the devices, which the size of a tile depends on.
    """
    if blocks is None or not any(each.opcode == "ragged-dot" for each in module.instructions()):
        return module
    flow = Flow(module)
    rewriting = _Rewriting(
        flow=flow, names=edit.Names(module), blocks=blocks, profile=profile, overflow=Overflow(module, flow)
    )
    for computation in module.computations:
        rewriting.computations[computation] = _ComputationWriter(computation, rewriting).write()
    return edit.module_of(module, [*rewriting.regions.values(), *rewriting.computations.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rewriting:
    """What the computations of a module share. regions: of reductions and sorts; computations: new ones by old."""

    flow: Flow
    names: edit.Names
    blocks: Blocks | None
    profile: HardwareProfile | None
    overflow: Overflow
    regions: dict[str, Computation] = field(default_factory=dict)
    computations: dict[Computation, Computation] = field(default_factory=dict)

    def divided(self, computation: Computation, orders: RowOrders) -> list[Mixture]:
        """The mixtures of a computation that the blocks divide, one of each order."""
        blocks = self.blocks
        if blocks is None:
            return []
        found: dict[Instruction, Mixture] = {}
        for mixture in find_mixtures(computation, self.flow, orders):
            if mixture.rows % blocks.count == 0 and mixture.groups % blocks.experts == 0:
                found.setdefault(mixture.order_keys, mixture)
        return list(found.values())


class _ComputationWriter:
    """Writes one computation."""

    def __init__(self, computation: Computation, shared: _Rewriting) -> None:
        self._computation, self._shared, self._flow = computation, shared, shared.flow
        self._orders = RowOrders(computation, shared.flow)
        self._writer = BlockWriter(computation.root, shared.names, shared.regions)
        self._loop_counts: list[Instruction] = []
        self._new: dict[Instruction, Instruction] = {}
        self._sorted: dict[Instruction, Mixture] = {}  # rows in sorted order, and whose
        self._tiles: dict[Instruction, Instruction] = {}
        self._fillers: dict[Instruction, float] = {}  # tiles -> what stands where there is no row, where it is known
        self._back: dict[Instruction, Instruction] = {}
        self._exchanges: dict[Mixture, Exchange] = {}
        self._mixture_of: dict[Instruction, Mixture] = {}
        self._by_keys: dict[Instruction, Mixture] = {}

    def write(self) -> Computation:
        computation, shared = self._computation, self._shared
        for mixture in shared.divided(computation, self._orders):
            self._by_keys[mixture.order_keys] = mixture
            self._mixture_of |= dict.fromkeys(mixture.products, mixture)
        late = _readers_of_question(computation)
        for old in computation:
            if old not in late:
                self._write_instruction(old)
        overflow = shared.overflow
        counted = overflow.select(computation, self._exchanges)
        count = sum_counts(self._writer, [*self._loop_counts, *(self._exchanges[each].over for each in counted)])
        for old in late:
            self._write_instruction(old, count)
        root = self._new[computation.root]
        is_carrying = count is not None and overflow.is_body(computation)
        if count is not None and is_carrying:
            root = overflow.carry(self._writer, self._new[computation.parameters[0]], root, count)
        written = self._writer.written
        live = live_instructions(root, written) if self._by_keys or is_carrying or late else set(written)
        new = edit.computation_of(computation, [each for each in written if each in live], root)
        if is_carrying:
            overflow.note_body(new)
        return new

    def _copy(self, old: Instruction, operands: list[Instruction]) -> Instruction:
        computations = self._shared.computations
        called = {
            name: tuple(computations.get(callee, callee) for callee in callees) for name, callees in old.called.items()
        }
        return edit.copy_of(old, operands, called=called)

    # ---- one instruction -----------------------------------------------------------
    def _write_instruction(self, old: Instruction, count: Instruction | None = None) -> None:
        """Write one instruction, or note that it is not to be: rows in sorted order. count: what was over."""
        self._writer.serve(old)
        mixture = self._mixture_of_rows(old)
        source = self._flow.source(old)
        if mixture is None and source is not old:
            mixture = self._sorted.get(source)  # through a tuple or a barrier
        if mixture is not None:
            self._sorted[old] = mixture
        elif is_question(old):
            self._new[old] = self._writer.constant("s32", 0) if count is None else count
        else:
            new = self._left_by_sorted(old) or self._folded(old)
            self._new[old] = self._write_copy(old) if new is None else new

    def _write_copy(self, old: Instruction) -> Instruction:
        new = self._copy(old, [self._value(operand) for operand in old.operands])
        if self._shared.overflow.is_carrying(new):
            elements, count = self._shared.overflow.write_loop(self._writer, new)
            self._loop_counts.append(count)
            return elements
        self._writer.written.append(new)
        return new

    def _value(self, old: Instruction) -> Instruction:
        """An old value, as the rest of the program reads it."""
        if old in self._new:
            return self._new[old]
        if old not in self._back:
            mixture = self._sorted[old]
            pairs = self._exchange(mixture).into_pairs(self._tile(old))
            self._back[old] = self._writer.take(pairs, self._permutation(mixture), 0)
        return self._back[old]

    def _folded(self, old: Instruction) -> Instruction | None:
        """What tells apart places that no index has: constants, and what they select."""
        if old.opcode == "select":
            where = self._orders.table(old.operands[0])
            if where is not None and where.order is not None and where.constant is not None:
                return self._value(old.operands[1 if where.constant else 2])
        return None

    # ---- rows in sorted order --------------------------------------------------------
    def _mixture_of_rows(self, old: Instruction) -> Mixture | None:
        """The mixture in whose sorted order the rows of a value are; None for other values."""
        if old in self._mixture_of:
            return None if is_weights(old) else self._mixture_of[old]
        if not old.shape.leaves or len(old.shape.leaves) != 1 or not dims_of(old):
            return None
        if self._orders.table(old) is not None:
            return None
        mixture = self._entered(old)
        if mixture is None and self._is_within_rows(old):
            mixture = next(each for operand in old.operands if (each := self._order_of(operand)) is not None)
        return mixture

    def _order_of(self, value: Instruction) -> Mixture | None:
        return self._sorted.get(self._flow.source(value))

    def _is_within_rows(self, old: Instruction) -> bool:
        """Whether an operation on sorted rows reads no row for another."""
        orders = {each for operand in old.operands if (each := self._order_of(operand)) is not None}
        if len(orders) != 1:
            return False
        (mixture,) = orders
        return dims_of(old)[0] == mixture.rows and self._keeps_rows(old, mixture)

    def _keeps_rows(self, old: Instruction, mixture: Mixture) -> bool:
        opcode, rows = old.opcode, mixture.rows
        if opcode in ELEMENTWISE and opcode != "opt-barrier":
            return all(dims_of(each) == dims_of(old) or not dims_of(each) for each in old.operands)
        (first, *_) = old.operands
        if self._order_of(first) is None and opcode != "concatenate":
            return False
        if opcode == "broadcast":
            return tuple(old.get("dimensions", ()))[:1] == (0,)
        if opcode in _VIEWS:
            return dims_of(first)[0] == rows
        if opcode == "reduce":
            return len(old.operands) == 2 and 0 not in old.get("dimensions")
        if opcode == "transpose":
            return bool(old.get("dimensions")[0] == 0)
        if opcode == "slice":
            return tuple(old.get("slice")[0])[:2] == (0, rows) and (*old.get("slice")[0], 1)[2] == 1
        if opcode == "pad":
            return tuple(old.get("padding")[0]) in ((0, 0), (0, 0, 0))
        if opcode == "concatenate":
            return tuple(old.get("dimensions")) != (0,)
        return False

    # ---- entries ---------------------------------------------------------------------
    def _entered(self, old: Instruction) -> Mixture | None:
        """The mixture whose rows a gather, or a scatter of pairs by the inverse, brings into sorted order."""
        order = None
        if old.opcode == "gather":
            order = self._order_of_gather(old, "sorted")
        elif old.opcode == "scatter":
            order = self._order_of_scatter(old, "pairs")
            if order is not None and not (self._divisor(old) == 1 and self._is_zero(old.operands[0])):
                order = None
        return None if order is None else self._by_keys.get(order.keys)

    def _order_of_gather(self, gather: Instruction, direction: str) -> Order | None:
        """The order by whose numbers whole rows are gathered, each of them as often as any other."""
        operand, indices = gather.operands
        rank = len(dims_of(operand))
        table = self._orders.table(indices)
        if table is None or table.order is None or table.order.direction != direction or table.divisor is None:
            return None
        is_rows = (
            tuple(gather.get("collapsed_slice_dims", ())) == (0,)
            and tuple(gather.get("start_index_map", ())) == (0,)
            and not gather.get("operand_batching_dims", ())
            and tuple(gather.get("slice_sizes"))[1:] == dims_of(operand)[1:]
            and tuple(gather.get("offset_dims", ())) == tuple(range(1, rank))
        )
        is_row_a_number = dims_of(indices) in ((table.order.rows,), (table.order.rows, 1))
        fits = dims_of(operand)[0] * table.divisor == table.order.rows
        return table.order if is_rows and is_row_a_number and fits and self._fit(table.order, table.divisor) else None

    def _order_of_scatter(self, scatter: Instruction, direction: str) -> Order | None:
        """The same of a scatter-add of whole rows."""
        if len(scatter.operands) != 3 or scatter.called["to_apply"][0].root.opcode != "add":
            return None
        operand, indices, updates = scatter.operands
        table = self._orders.table(indices)
        if table is None or table.order is None or table.order.direction != direction or table.divisor is None:
            return None
        rank = len(dims_of(operand))
        is_rows = (
            tuple(scatter.get("inserted_window_dims", ())) == (0,)
            and tuple(scatter.get("scatter_dims_to_operand_dims", ())) == (0,)
            and not scatter.get("input_batching_dims", ())
            and tuple(scatter.get("update_window_dims", ())) == tuple(range(1, rank))
            and dims_of(updates)[1:] == dims_of(operand)[1:]
        )
        is_row_a_number = dims_of(indices) in ((table.order.rows,), (table.order.rows, 1))
        fits = dims_of(operand)[0] * table.divisor == table.order.rows
        return table.order if is_rows and is_row_a_number and fits and self._fit(table.order, table.divisor) else None

    def _fit(self, order: Order, pairs_per_row: int) -> bool:
        """Whether the pairs of a row lie in one block."""
        blocks = self._shared.blocks
        return blocks is not None and (order.rows // blocks.count) % pairs_per_row == 0

    def _divisor(self, moved: Instruction) -> int:
        table = self._orders.table(moved.operands[1])
        assert table is not None
        assert table.divisor is not None
        return table.divisor

    def _is_zero(self, value: Instruction) -> bool:
        return number_of(self._flow, value) == 0

    # ---- exits -----------------------------------------------------------------------
    def _left_by_sorted(self, old: Instruction) -> Instruction | None:
        """The new value of what reads sorted rows in a known way; None for others."""
        if old in self._mixture_of:
            mixture = self._mixture_of[old]
            return self._multiply_weights(old, mixture)
        if old.opcode == "gather" and self._order_of(old.operands[0]) is not None:
            order = self._order_of_gather(old, "pairs")
            if order is not None and self._is_of(order, old.operands[0]) and self._divisor(old) == 1:
                return self._into_pairs(old.operands[0])
        if old.opcode == "scatter" and self._order_of(old.operands[-1]) is not None:
            order = self._order_of_scatter(old, "sorted")
            if order is not None and self._is_of(order, old.operands[2]):
                return self._sum_pairs(old)
        return None

    def _multiply_weights(self, old: Instruction, mixture: Mixture) -> Instruction:
        exchange = self._exchange(mixture)
        tiles = [self._tile(operand, mixture) for operand in old.operands[:2]]
        fillers = [self._fillers.get(each) for each in tiles]
        is_clear = 0 in fillers and all(each is not None and isfinite(each) for each in fillers)
        if not is_clear:
            tiles = [exchange.layout.cleared(each) for each in tiles]
        return exchange.layout.multiply_weights(old, *tiles)

    def _is_of(self, order: Order, value: Instruction) -> bool:
        return self._by_keys.get(order.keys) is self._order_of(value)

    def _into_pairs(self, value: Instruction) -> Instruction:
        mixture = self._order_of(value)
        assert mixture is not None
        return self._exchange(mixture).into_pairs(self._tile(value))

    def _sum_pairs(self, scatter: Instruction) -> Instruction:
        """Of each token, the sum of its pairs, and what was there before."""
        writer, k = self._writer, self._divisor(scatter)
        pairs = self._into_pairs(scatter.operands[2])
        element_type = type_of(scatter)
        if k > 1:
            rest = dims_of(pairs)[1:]
            pairs = writer.reshape(pairs, (dims_of(pairs)[0] // k, k, *rest))
            pairs = writer.total(pairs, [1], element_type)
        if self._is_zero(scatter.operands[0]):
            return pairs
        return writer.elementwise("add", self._value(scatter.operands[0]), pairs)

    # ---- tiles -----------------------------------------------------------------------
    def _exchange(self, mixture: Mixture) -> Exchange:
        if mixture not in self._exchanges:
            blocks, profile = self._shared.blocks, self._shared.profile
            assert blocks is not None
            element_type = type_of(mixture.products[0].operands[0])
            sizes = sizes_of(mixture.rows, mixture.groups, blocks, profile, element_type)
            layout = choose_layout(mixture.products, sizes, profile)
            keys = self._value(mixture.groups_of_pairs)
            self._exchanges[mixture] = Exchange(self._writer, layout.fit(sizes), layout, keys)
        return self._exchanges[mixture]

    def _permutation(self, mixture: Mixture) -> Instruction:
        """[pairs]: the pair at each place of the sorted order."""
        return self._value(self._orders.permutations[mixture.order_keys])

    def _tile(self, old: Instruction, mixture: Mixture | None = None) -> Instruction:
        """The tiles of rows in sorted order. mixture: whose, where they are not known to be."""
        old = self._flow.source(old)
        owner = self._sorted.get(old)
        if owner is None or (mixture is not None and owner is not mixture):
            assert mixture is not None
            return self._tile_other(old, mixture)
        if old not in self._tiles:
            with self._writer.serving(old):
                self._tiles[old] = self._write_tiles(old, owner)
        return self._tiles[old]

    def _tile_other(self, old: Instruction, mixture: Mixture) -> Instruction:
        """Tiles of a value whose rows stand in sorted order as any array's do: by way of pairs."""
        writer = self._writer
        table = self._orders.table(old)
        exchange = self._exchange(mixture)
        lead = exchange.layout.lead
        if old.opcode == "broadcast" and 0 not in old.get("dimensions", ()):
            along = [int(dim) + len(lead) - 1 for dim in old.get("dimensions", ())]
            tiles = writer.spread(self._value(old.operands[0]), (*lead, *dims_of(old)[1:]), along)
            return self._filled_with(tiles, number_of(self._flow, old))
        if table is not None and table.constant is not None:
            tiles = writer.filled(table.constant, (*lead, *dims_of(old)[1:]), type_of(old))
            return self._filled_with(tiles, table.constant)
        inverse = writer.sort_with_places(self._permutation(mixture))
        return self._filled_with(exchange.into_layout(writer.take(self._value(old), inverse, 0), 1), 0)

    def _filled_with(self, tiles: Instruction, number: float | None) -> Instruction:
        """The tiles, with a note of what stands where there is no row."""
        if number is not None:
            self._fillers[tiles] = number
        return tiles

    def _write_tiles(self, old: Instruction, mixture: Mixture) -> Instruction:
        exchange = self._exchange(mixture)
        if old in self._mixture_of:
            tiles = self._tile(old.operands[0], mixture)
            is_zero = self._fillers.get(tiles) == 0
            product = exchange.layout.multiply(old, tiles, self._value(old.operands[1]))
            return self._filled_with(product, 0 if is_zero else None)
        if self._entered(old) is mixture:
            return self._filled_with(self._enter(old, exchange), 0)
        if old.opcode == "select":
            where = self._orders.table(old.operands[0])
            if where is not None and where.order is not None and where.constant is not None:
                return self._tile(old.operands[1 if where.constant else 2], mixture)
        return self._move_into_tiles(old, mixture, exchange.layout.lead)

    def _enter(self, old: Instruction, exchange: Exchange) -> Instruction:
        rows = old.operands[0] if old.opcode == "gather" else old.operands[2]
        return exchange.into_layout(self._value(rows), self._divisor(old))

    def _move_into_tiles(self, old: Instruction, mixture: Mixture, lead: tuple[int, ...]) -> Instruction:
        """An operation within rows, of tiles."""
        dims = (*lead, *dims_of(old)[1:])
        operands = [
            self._tile(operand, mixture) if self._is_by_rows(old, place, operand, mixture) else self._value(operand)
            for place, operand in enumerate(old.operands)
        ]
        new = self._writer.array(old.opcode, type_of(old), dims, *operands)
        new.attributes |= {name: each for name, each in old.attributes.items() if name not in _OF_DIMS}
        new.called = {
            name: tuple(self._shared.computations.get(each, each) for each in callees)
            for name, callees in old.called.items()
        }
        new.attributes |= edit.callee_attributes(new.called)
        if old.opcode in _MOVED:
            name, move = _MOVED[old.opcode]
            new.attributes |= {name: move(old, len(lead) - 1, lead)}
        return self._filled_with(edit.check_consistency(new), self._filler(old, operands))

    def _filler(self, old: Instruction, tiles: Sequence[Instruction]) -> float | None:
        """What an operation of tiles makes of what stands where there is no row."""
        fillers = [self._fillers.get(each, number_of(self._flow, each)) for each in tiles]
        known = [each for each in fillers if each is not None]
        if len(known) < len(fillers):
            return None
        if old.opcode in _UNCHANGING:
            return known[0] if len(set(known)) == 1 else None
        if old.opcode == "reduce":
            return 0 if known == [0, 0] and old.called["to_apply"][0].root.opcode in ("add", "maximum") else None
        if old.opcode not in ELEMENTWISE:
            return None
        numbers = [
            np.asarray(bool(each) if type_of(tile) == "pred" else each) for each, tile in zip(known, tiles, strict=True)
        ]
        with np.errstate(all="ignore"):
            if old.opcode == "compare":
                return float(compare(old.get("direction"), *numbers))
            if old.opcode == "convert":
                return float(convert(numbers[0], type_of(old)))
            return float(OPERATIONS[old.opcode](*numbers))

    @staticmethod
    def _is_by_rows(old: Instruction, place: int, operand: Instruction, mixture: Mixture) -> bool:
        """Whether an operand has rows: not a scalar of a reduction, of padding, of a selection."""
        return bool(dims_of(operand)) and dims_of(operand)[0] == mixture.rows and not (old.opcode == "reduce" and place)


def _readers_of_question(computation: Computation) -> dict[Instruction, None]:
    """Questions for the count and all that reads them, in order: written when everything is counted."""
    late: dict[Instruction, None] = {}
    for each in computation:
        if is_question(each) or any(operand in late for operand in each.operands):
            late[each] = None
    return late


def _moved_dims(old: Instruction, more: int, lead: tuple[int, ...]) -> Attribute:
    dims = [int(dim) for dim in old.get("dimensions", ())]
    if old.opcode in ("broadcast", "transpose"):  # the rows' dimension is first
        return edit.int_list("dimensions", [*range(more), *(dim + more for dim in dims)])
    return edit.int_list("dimensions", [dim + more for dim in dims])


def _moved_slices(old: Instruction, more: int, lead: tuple[int, ...]) -> Attribute:
    own = [(*each, 1)[:3] for each in old.get("slice")[1:]]
    return edit.slice_ranges([*((0, size, 1) for size in lead), *own])


def _moved_padding(old: Instruction, more: int, lead: tuple[int, ...]) -> Attribute:
    own = [(*each, 0)[:3] for each in old.get("padding")[1:]]
    return edit.padding([*((0, 0, 0) for _ in lead), *own])


#: Operations that make no other numbers.
_UNCHANGING = frozenset({*_VIEWS, "broadcast", "transpose", "slice", "concatenate", "pad"})

#: Attributes that name dimensions.
_OF_DIMS = frozenset({"dimensions", "slice", "padding", "sharding"})

_MOVED: Mapping[str, tuple[str, Callable[[Instruction, int, tuple[int, ...]], Attribute]]] = {
    "broadcast": ("dimensions", _moved_dims),
    "transpose": ("dimensions", _moved_dims),
    "reduce": ("dimensions", _moved_dims),
    "concatenate": ("dimensions", _moved_dims),
    "slice": ("slice", _moved_slices),
    "pad": ("padding", _moved_padding),
}
