"""Rematerialization inside loops over layers: recompute rows in the backward loop instead of stacking them.

JAX turns `lax.scan` into a forward loop with stacked rows and a backward loop that reads them. Both loops also have
the same other arrays: stacked weights and loop invariants. The backward loop's body can therefore recompute a row of
a stack from rows that stay stacked, with instructions cloned from the forward loop's body. A value not stacked
before may become stacked: mostly a layer's input. Unlike in straight code no barrier is needed: XLA merges nothing
across loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, TupleShape
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.loop_bodies import LoopBody, is_carried
from shardwright.planner.rewrites.stacked_loops import StackedLoop, match_stacked_loop

#: What only writes the same elements in another shape.
_SAME_ELEMENTS = frozenset({"reshape", "bitcast"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRow:
    """A stack of the forward loop with its backward loop as only consumer.

    written: the carried element of the forward loop.
    read: the carried element of the backward loop.
    value: the stacked value in the forward loop's body.
    """

    written: int
    read: int
    value: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPair:
    """A forward loop, and the backward loop that reads its stacked rows."""

    forward: StackedLoop
    backward: StackedLoop
    saved: tuple[SavedRow, ...]

    @property
    def body(self) -> Computation:
        """The forward loop's body."""
        (body,) = self.forward.loop.called["body"]
        return body

    @property
    def backward_body(self) -> Computation:
        """The backward loop's body."""
        (body,) = self.backward.loop.called["body"]
        return body

    def element(self, value: Instruction) -> int | None:
        """The carried element of a value of the forward body, or None."""
        return value.index if is_carried(value, self.body) else None

    def is_at_hand(self, value: Instruction) -> bool:
        """Whether the backward loop has a value without storage: stacked weights, constants, the row's number."""
        element = self.element(value)
        if element is not None:
            return element not in self.forward.threaded and element not in self.forward.writes
        return value.opcode in ("constant", "iota", "parameter")


def loop_pairs(module: Module) -> list[LoopPair]:
    """Pairs of loops of the entry computation, in the order of the forward loops."""
    loops = [
        candidate for i in module.entry if i.opcode == "while" and (candidate := match_stacked_loop(i)) is not None
    ]
    if len(loops) < 2:
        return []
    users: dict[Instruction, list[Instruction]] = {}
    for instruction in module.entry:
        for operand in dict.fromkeys(instruction.operands):
            users.setdefault(operand, []).append(instruction)
    shared = {name for name, count in Counter(_regions(module)).items() if count > 1}
    loops = [candidate for candidate in loops if shared.isdisjoint(c.name for (c,) in candidate.loop.called.values())]
    pairs = []
    for forward in loops:
        for backward in loops:
            saved = _find_saved_rows(forward, backward, users)
            if saved and not forward.is_descending and forward.rows == backward.rows:
                pairs.append(LoopPair(forward=forward, backward=backward, saved=saved))
                break
    return pairs


def _regions(module: Module) -> Iterator[str]:
    """Names of the loops' computations, one per use."""
    for instruction in module.instructions():
        if instruction.opcode == "while":
            yield from (computation.name for (computation,) in instruction.called.values())


def _find_saved_rows(
    forward: StackedLoop, backward: StackedLoop, users: Mapping[Instruction, Sequence[Instruction]]
) -> tuple[SavedRow, ...]:
    (body,) = forward.loop.called["body"]
    carried = backward.loop.operands[0]
    saved = []
    for element in users.get(forward.loop, ()):
        if element.opcode != "get-tuple-element" or element.index not in forward.writes:
            continue
        places = [k for k in backward.reads if carried.operands[k] is element]
        if len(places) == 1 and list(users.get(element, ())) == [carried] and carried.operands.count(element) == 1:
            value = _origin(body.root.operands[element.index].operands[1])
            if forward.indices[element.index][0].operands[2].shape != backward.indices[places[0]][0].operands[1].shape:
                continue
            saved.append(SavedRow(written=element.index, read=places[0], value=value))
    return tuple(saved)


def _origin(value: Instruction) -> Instruction:
    while value.opcode in _SAME_ELEMENTS:
        (value,) = value.operands
    return value


def rematerialize_loops(module: Module, recompute: Set[str]) -> tuple[Module, dict[str, str]]:
    """The program with the values of `recompute` recomputed in its backward loops, limited to their reads.

    recompute: names of instructions in bodies of forward loops. Their inputs are stored: one stacked row a trip.
    Also gives, for each added instruction, its original. Results equal the original program's, but for XLA's different
    fusions. `module` is not changed.
    """
    twins: dict[str, str] = {}
    names = edit.Names(module)
    with edit.without_gc():
        for number in range(len(loop_pairs(module)) if recompute else 0):
            pair = loop_pairs(module)[number]  # of the current module: a rewrite replaces loops
            module = _Rewrite(module=module, pair=pair, names=names, recompute=recompute, twins=twins).run()
    return module, twins


def stack_rows(module: Module, rows: Mapping[str, str]) -> Module:
    """The program with values of its backward loops read from stacks instead of computed.

    rows: their names, and those of the equal values of forward loops, of which one row a trip is stored. `module` is
    not changed.
    """
    names = edit.Names(module)
    with edit.without_gc():
        for number in range(len(loop_pairs(module)) if rows else 0):
            pair = loop_pairs(module)[number]
            module = _Rewrite(module=module, pair=pair, names=names, recompute=frozenset(), twins={}, rows=rows).run()
    return module


@dataclass(slots=True, kw_only=True, eq=False)
class _Rewrite:
    """One pair of loops.

    rows: names of values of the backward body to be read from stacks, and of the forward body's equal values.
    dropped: stacks that are no longer stored.
    stacked: values of the forward body with a new stack.
    """

    module: Module
    pair: LoopPair
    names: edit.Names
    recompute: Set[str]
    twins: dict[str, str]
    rows: Mapping[str, str] = field(default_factory=dict)
    dropped: list[SavedRow] = field(default_factory=list)
    clones: list[Instruction] = field(default_factory=list)  # instructions of the forward body, in its order
    stacked: list[Instruction] = field(default_factory=list)
    backward_elements: dict[int, int] = field(default_factory=dict)  # forward element at hand → the backward loop's

    def run(self) -> Module:
        self.dropped = [row for row in self.pair.saved if row.value.name in self.recompute]
        self._look_for_sources()
        stored = set(self.rows.values())
        self.stacked += [value for value in self.pair.body if value.name in stored]
        if not self.dropped and not self.stacked:
            return self.module
        forward, backward = self.pair.forward.loop, self.pair.backward.loop
        out: list[Instruction] = []
        copies: dict[Instruction, Instruction] = {}
        skipped = {forward.operands[0], backward.operands[0]}
        for old in self.module.entry:
            if old is forward:
                copies[old] = self._forward_loop(copies, out)
            elif old is backward:
                copies[old] = self._backward_loop(copies, out)
            elif old.opcode == "get-tuple-element" and old.operands[0] is forward:
                if old.index not in self._gone:
                    copies[old] = self._element(copies[forward], self._shift_index(old.index, self._gone), old, out)
            elif old.opcode == "get-tuple-element" and old.operands[0] is backward:
                copies[old] = self._element(copies[backward], self._shift_index(old.index, self._unread), old, out)
            elif old not in skipped:
                copies[old] = edit.copy_of(old, [copies[operand] for operand in old.operands])
                out.append(copies[old])
        entry = edit.computation_of(self.module.entry, out, copies[self.module.entry.root])
        return edit.module_of(self.module, self._computations(entry, copies[forward], copies[backward]))

    def _computations(self, entry: Computation, *loops: Instruction) -> list[Computation]:
        replaced: dict[Computation, Computation] = {self.module.entry: entry}
        for old, new in zip((self.pair.forward.loop, self.pair.backward.loop), loops, strict=True):
            for name in ("body", "condition"):
                replaced[old.called[name][0]] = new.called[name][0]
        return [replaced.get(computation, computation) for computation in self.module.computations]

    # ---- what is read where ------------------------------------------------------
    @property
    def _gone(self) -> list[int]:
        """Elements no longer carried by the forward loop."""
        return [row.written for row in self.dropped]

    @property
    def _unread(self) -> list[int]:
        """Elements no longer carried by the backward loop."""
        return [row.read for row in self.dropped]

    @staticmethod
    def _shift_index(index: int, dropped: Sequence[int]) -> int:
        return index - sum(other < index for other in dropped)

    def _look_for_sources(self) -> None:
        """Fill `clones`, `stacked` and `backward_elements`: the sources of the dropped rows."""
        stored = {row.value for row in self.pair.saved if row not in self.dropped}
        needed: set[Instruction] = set()
        todo = [row.value for row in self.dropped]
        while todo:
            value = todo.pop()
            if value in needed:
                continue
            needed.add(value)
            if self._is_cloned(value, stored):
                todo += value.operands
        for value in self.pair.body:
            if value not in needed or value in stored:
                continue
            element = self.pair.element(value)
            if self._is_cloned(value, stored):
                self.clones.append(value)
            elif element is None or not self.pair.is_at_hand(value):
                self.stacked.append(value)
            elif element != self.pair.forward.counter:
                self.backward_elements[element] = -1

    def _is_cloned(self, value: Instruction, stored: Set[Instruction]) -> bool:
        if value in stored or self.pair.element(value) is not None:
            return False
        return value.name in self.recompute or self.pair.is_at_hand(value)

    # ---- the forward loop ----------------------------------------------------------
    def _forward_loop(self, copies: Mapping[Instruction, Instruction], out: list[Instruction]) -> Instruction:
        old = self.pair.forward.loop
        carried = [copies[o] for k, o in enumerate(old.operands[0].operands) if k not in self._gone]
        carried += [self._zeros(value, out) for value in self.stacked]
        body = LoopBody(self.pair.forward.loop, self.names, self._gone, [element.shape for element in carried])
        for instruction in self.pair.body:
            is_gone = any(instruction is self.pair.body.root.operands[row.written] for row in self.dropped)
            if instruction is not self.pair.body.root and not is_gone:
                body.copy(instruction)
        written = [body.made[operand] for k, operand in enumerate(self.pair.body.root.operands) if k not in self._gone]
        for value, stack in zip(self.stacked, carried[len(written) :], strict=True):
            place = body.element(len(written), stack.shape, value.name)
            row = body.row_of(self.pair.forward.indices[self.pair.forward.writes[0]][0], stack.shape)
            (update,) = body.add(edit.reshape_to(body.made[value], (1, *_dims(value)), self._name(value, "row")))
            step = Instruction(self._name(value, "stacked"), "dynamic-update-slice", stack.shape, (place, update, *row))
            body.add(step)
            written.append(step)
        return body.loop(carried, written, out)

    def _zeros(self, value: Instruction, out: list[Instruction]) -> Instruction:
        shape = value.shape
        assert isinstance(shape, ArrayShape)
        zero = Instruction(
            self._name(value, "zero"), "constant", ArrayShape(shape.element_type, ()), payload=_zero(shape)
        )
        stack = ArrayShape(shape.element_type, (self.pair.forward.rows, *shape.dimensions))
        zeros = Instruction(self._name(value, "zeros"), "broadcast", stack, (zero,))
        zeros.attributes["dimensions"] = edit.int_list("dimensions", ())
        out += [zero, zeros]
        return zeros

    def _name(self, value: Instruction, suffix: str) -> str:
        name = self.names.like(value.name, suffix)
        self.twins[name] = value.name
        return name

    # ---- the backward loop ---------------------------------------------------------
    def _backward_loop(self, copies: Mapping[Instruction, Instruction], out: list[Instruction]) -> Instruction:
        old, forward = self.pair.backward.loop, self.pair.forward.loop
        carried = [copies[o] for k, o in enumerate(old.operands[0].operands) if k not in self._unread]
        (source,) = old.called["body"]
        rows = {row.read: row for row in self.dropped}
        for element in self.backward_elements:
            value = copies[forward.operands[0].operands[element]]
            self.backward_elements[element] = next(
                (k for k, operand in enumerate(carried) if operand is value and self._stays(k)), -1
            )
            if self.backward_elements[element] < 0:
                self.backward_elements[element] = len(carried)
                carried.append(value)
        first_stack = len(carried)
        forward_shape = self.pair.forward.loop.shape
        assert isinstance(forward_shape, TupleShape)
        count = len(forward_shape.elements) - len(self.dropped)
        for number, value in enumerate(self.stacked):
            carried.append(self._element(copies[forward], count + number, value, out, self._name(value, "stack")))
        body = LoopBody(self.pair.backward.loop, self.names, self._unread, [operand.shape for operand in carried])
        index_of = next(taker for k in self.pair.backward.reads for taker in self.pair.backward.indices[k])
        clones = self._write_clones(body, index_of, carried, first_stack)
        of_name = {value.name: value for value in clones}
        body.made |= {old: clones[of_name[self.rows[old.name]]] for old in source if old.name in self.rows}
        dropped = {node: rows[node.index] for node in source if is_carried(node, source) and node.index in rows}
        for instruction in source:
            if instruction is source.root or instruction in body.made or instruction in dropped:
                continue
            if instruction.opcode == "dynamic-slice" and instruction.operands[0] in dropped:
                assert isinstance(instruction.shape, ArrayShape)
                value = clones[dropped[instruction.operands[0]].value]
                row = edit.reshape_to(value, instruction.shape.dimensions, instruction.name)
                (body.made[instruction],) = body.add(row)
            else:
                body.copy(instruction)
        handed_on = [body.made[o] for k, o in enumerate(source.root.operands) if k not in self._unread]
        handed_on += [body.element(k, carried[k].shape, old.name) for k in range(len(handed_on), len(carried))]
        return body.loop(carried, handed_on, out)

    def _stays(self, moved: int) -> bool:
        """Whether the backward loop hands an element on unchanged."""
        stay = {self._shift_index(k, self._unread) for k in (*self.pair.backward.reads, *self.pair.backward.fixed)}
        return moved in stay

    def _write_clones(
        self, body: LoopBody, taker: Instruction, carried: Sequence[Instruction], first_stack: int
    ) -> dict[Instruction, Instruction]:
        """The backward body's substitutes for values of the forward body: clones and their inputs."""
        substitutes: dict[Instruction, Instruction] = {}
        for row in self.pair.saved:
            if row not in self.dropped:
                slice_of_row = self.pair.backward.indices[row.read][0]
                substitutes[row.value] = self._reshape_row(body, body.with_operands(slice_of_row), row.value)
        for number, value in enumerate(self.stacked):
            stack = carried[first_stack + number].shape
            assert isinstance(stack, ArrayShape)
            place = body.element(first_stack + number, stack, value.name)
            sizes = (1, *stack.dimensions[1:])
            row_slice = Instruction(
                self._name(value, "kept"), "dynamic-slice", ArrayShape(stack.element_type, sizes),
                (place, *body.row_of(taker, stack)),
            )  # fmt: skip
            row_slice.attributes["dynamic_slice_sizes"] = edit.int_list("dynamic_slice_sizes", sizes)
            substitutes[value] = self._reshape_row(body, body.add(row_slice)[0], value)
        for value in self.pair.body:
            element = self.pair.element(value)
            if element == self.pair.forward.counter:
                substitutes[value] = body.with_operands(taker.operands[1])
            elif element is not None and element in self.backward_elements:
                number = self.backward_elements[element]
                substitutes[value] = body.element(number, carried[number].shape, value.name)
        for value in self.clones:
            name = self._name(value, "remat")
            substitutes[value] = edit.copy_of(value, [substitutes[operand] for operand in value.operands], name=name)
            body.add(substitutes[value])
        return substitutes

    def _reshape_row(self, body: LoopBody, row: Instruction, value: Instruction) -> Instruction:
        return body.add(edit.reshape_to(row, _dims(value), self._name(value, "kept")))[0]

    def _element(
        self, loop: Instruction, index: int, like: Instruction, out: list[Instruction], name: str | None = None
    ) -> Instruction:
        """An element of a loop's result, in place of `like` or under a name of its own."""
        assert isinstance(loop.shape, TupleShape)
        if name is None:
            element = edit.copy_of(like, (loop,), index=index)
        else:
            element = Instruction(name, "get-tuple-element", loop.shape.elements[index], (loop,), index=index)
        element.attributes["index"] = edit.attribute("index", str(index))
        out.append(element)
        return element


def _dims(value: Instruction) -> tuple[int, ...]:
    assert isinstance(value.shape, ArrayShape)
    return value.shape.dimensions


def _zero(shape: ArrayShape) -> str:
    return "false" if shape.element_type == "pred" else "0"
