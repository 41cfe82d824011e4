"""Goes through a planned program as JAX would under a mesh of Explicit axes, and asks where the two part.

JAX types a value by its operands' types, forward. Where it cannot, or has another sharding than the plan, the plan's is
to be written there. Of the backward pass nothing can be written: a cotangent has the type of its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.explicit.answer import OutShardings
from shardwright.explicit.asked import ASKABLE, BROUGHT, RESULT, Questions, location_of
from shardwright.explicit.rules import AmbiguousTypeError, TypeRules, Types
from shardwright.explicit.variables import as_user_sees
from shardwright.hlo import Computation, Instruction, Module, TupleShape, parse
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import TensorSharding
from shardwright.xla.jax_shardings import to_partition_spec, to_partition_specs


def find_out_shardings(plan: Plan) -> OutShardings:
    """Raises PlanError if the plan computes otherwise than the function, splits unevenly, or has no HLO text."""
    in_user_dims, notes = as_user_sees(plan)
    in_user_dims.require_portable()
    specs = to_partition_specs(in_user_dims)
    module = parse(plan.require_hlo())
    walk = _Walk(module, plan)
    walk.run()
    return OutShardings(
        mesh_sizes=tuple(plan.mesh.sizes.values()),
        mesh_names=tuple(plan.mesh.sizes),
        arguments=specs.arguments,
        results=specs.results,
        entries=walk.questions.entries(),
        backward=tuple(dict.fromkeys(walk.backward_sentences())),
        notes=tuple(dict.fromkeys([*notes, *walk.notes])),
        names=tuple((v.name, to_partition_spec(v.sharding, len(v.shape))) for v in in_user_dims.parameters),
    )


class _Walk:
    """One way through the program, operands first.

    types: what JAX has for each value. free: values of no argument; JAX lays them out as what they meet wants them.
    backward: values of the backward pass. after: those that follow from it, updates of parameters.
    forward: those that results are made of, not through the backward pass.
    """

    def __init__(self, module: Module, plan: Plan) -> None:
        self.notes: list[str] = []
        self._module = module
        self._plan = plan
        self._entries = {entry.name: entry for entry in plan.instructions}
        self._rules = TypeRules(plan.mesh)
        self._types: dict[Instruction, Types] = {}
        self._free: set[Instruction] = set()
        self._backward: set[Instruction] = set()
        self._readers: dict[Instruction, list[Instruction]] = {}
        self._forward_types: dict[tuple[str, int, int, tuple[int, ...]], TensorSharding] = {}
        self._gradients: list[tuple[Instruction, TensorSharding, TensorSharding]] = []
        self._forward: set[Instruction] = set()
        self._after: set[Instruction] = set()
        self._viewed: dict[Instruction, tuple[bool, ...]] = {}
        self._stacked: set[Instruction] = set()
        for instruction in module.instructions():
            for operand in instruction.operands:
                self._readers.setdefault(operand, []).append(instruction)
        self.questions = Questions(module, self._readers)

    def run(self) -> None:
        self._mark_forward([self._module.entry.root])
        self._walk(self._module.entry, None, is_backward=False)

    def _mark_forward(self, results: Sequence[Instruction]) -> None:
        """What these results are made of, not through the backward pass: no other value's layout can be said.

        A mask that the forward pass saves for the backward pass alone is no part of it.
        """
        pending = list(results)
        while pending:
            value = pending.pop()
            if value in self._forward or "transpose(" in value.op_name:
                continue
            self._forward.add(value)
            loop = value.operands[0] if value.opcode == "get-tuple-element" else value
            if loop.opcode != "while":
                pending += value.operands
                continue
            (body,) = loop.called["body"]
            ends = body.root.operands if body.root.opcode == "tuple" else (body.root,)
            read = [end for number, end in enumerate(ends) if value is loop or number == value.index]
            pending += [*loop.operands, *read, *(end for end in ends if not _is_stacked(end, body))]

    def backward_sentences(self) -> list[str]:
        """What the plan does in the backward pass, where JAX does otherwise."""
        sentences = []
        for instruction, planned, typed in self._gradients:
            place = self._module.place(instruction) or instruction.name
            sentences.append(
                f"{place}: the gradient lies {planned} in the plan; JAX gives it the type of its value, {typed}"
            )
        silent = {each.name for each in self._backward if not self.questions.is_asked(each)}
        for collective in self._plan.collectives:
            if collective.instruction in silent and collective.kind not in ("all-reduce", "reduce-scatter"):
                sentences.append(f"{collective.kind} over {collective.over}: {collective.cause}")
        return sentences

    def _walk(
        self, computation: Computation, given: Types | None, views: tuple[bool, ...] = (), *, is_backward: bool
    ) -> None:
        """given, views: of the parameter of a loop's body; None: of the entry."""
        for instruction in computation:
            if instruction.opcode == "parameter" and given is not None:
                self._types[instruction], self._viewed[instruction] = given, views
                if is_backward:
                    self._backward.add(instruction)
                continue
            self._viewed[instruction] = self._find_views(instruction)
            if self._is_backward(instruction, is_backward):
                self._backward.add(instruction)
            elif any(operand in self._backward or operand in self._after for operand in instruction.operands):
                self._after.add(instruction)
            self._types[instruction] = self._type(instruction)
            if instruction not in self._backward:
                self._remember(instruction)

    def _is_backward(self, instruction: Instruction, is_within: bool) -> bool:
        """By its name, `jit(step)/transpose(jvp())/mul`; of what has none, by what it reads."""
        name = instruction.op_name
        if is_within or "transpose(" in name:
            return True
        if "/" in name or instruction.opcode == "parameter":
            return False
        return any(operand in self._backward for operand in instruction.operands)

    def _find_views(self, instruction: Instruction) -> tuple[bool, ...]:
        """Whether its arrays have other dimensions than the user's: they lie between two reshapes of the planner's."""
        operands, count = instruction.operands, len(instruction.shape.leaves)
        if instruction.opcode == "parameter":
            return (self._plan.parameters[instruction.index].view_of is not None,) * count
        views = [view for operand in operands for view in self._viewed[operand]]
        if instruction.opcode in ("tuple", "while"):
            return tuple(views)
        if instruction.opcode == "get-tuple-element":
            start, stop = _element(instruction)
            return tuple(views[start:stop])
        if instruction.opcode == "reshape" and instruction.name.rpartition(".")[2] in ADDED_RESHAPES:
            return (not views[0],)
        return (any(views),) * count

    def _type(self, instruction: Instruction) -> Types:
        opcode, entry = instruction.opcode, self._entries.get(instruction.name)
        operands = instruction.operands
        if opcode == "tuple":
            return tuple(leaf for operand in operands for leaf in self._types[operand])
        if opcode == "get-tuple-element":
            if operands[0] in self._backward:
                self._backward.add(instruction)
            start, stop = _element(instruction)
            return self._types[operands[0]][start:stop]
        planned = _reduced(entry.result) if entry else _whole(instruction)
        if opcode == "parameter":
            return planned
        if (operands and all(operand in self._free for operand in operands)) or opcode in ("constant", "iota"):
            self._free.add(instruction)
            return _whole(instruction)
        if instruction in self._backward:
            return self._gradient_type(instruction, planned)
        if opcode == "while":
            return self._loop(instruction, planned)
        if entry is None or len(planned) != 1 or isinstance(instruction.shape, TupleShape):
            return planned
        self._note_partial(instruction, entry.result)
        if instruction in self._stacked:
            return planned
        used = [_reduced(sharding)[0] if len(sharding) == 1 else None for sharding in entry.operands]
        return (self._one(instruction, planned[0], used),)

    # ---- one instruction of the forward pass, or of what follows the gradients -------------------

    def _one(
        self, instruction: Instruction, planned: TensorSharding, used: Sequence[TensorSharding | None]
    ) -> TensorSharding:
        """The type of its result, once all is written there that has to be."""
        given = self._operands(instruction, used, brings_all=False)
        result = self._ask(instruction, given)
        if result is None and instruction.opcode not in ASKABLE:
            return self._ask(instruction, self._operands(instruction, used, brings_all=True)) or planned
        if result is None and not self.questions.takes_out_sharding(instruction):
            return self._split_less(instruction, given) or planned
        is_needed = result is None or self._has_to_say(instruction, result, planned)
        if is_needed or instruction.opcode in ASKABLE:
            answered = self._call_result(instruction)
            layout = _reduced(self._entries[answered.name].result)[0]
            self._say(instruction, layout, is_needed=is_needed)
        return planned if result is None or is_needed else result

    def _has_to_say(self, instruction: Instruction, result: TensorSharding, planned: TensorSharding) -> bool:
        """Whether the plan's layout is to be written, where JAX has another by itself.

        Of what is computed element by element, JAX's is the same, or splits less and moves nothing.
        """
        if result == planned or instruction not in self._forward or instruction in self._after:
            return False
        if self._is_returned(instruction) or instruction.opcode == "broadcast":
            return False  # the results' own shardings say so; what is split less takes the sharding of what it meets
        return self.questions.takes_out_sharding(instruction)

    def _say(
        self, instruction: Instruction, layout: TensorSharding, *, of: Instruction | None = None, **details: Any
    ) -> None:
        """Asks, where the value has the dimensions of the user's program; of: what lies so, where it is another."""
        if any(self._viewed[of or instruction]):
            if details.get("is_needed", True):
                place = self._module.place(instruction) or instruction.name
                self.notes.append(
                    f"{place}: the plan computes it from views of arguments, {layout}, which no line says: "
                    'plan with rewrites="none" to be told'
                )
            return
        self.questions.note(instruction, layout, **details)

    def _split_less(self, instruction: Instruction, given: Sequence[TensorSharding]) -> TensorSharding | None:
        """The type of what a library's call makes of an operand that has to be split less; None if none helps."""
        for number, typed in enumerate(given):
            for dim, axes in enumerate(typed.dims):
                less = TensorSharding((*typed.dims[:dim], (), *typed.dims[dim + 1 :]))
                result = self._ask(instruction, [*given[:number], less, *given[number + 1 :]]) if axes else None
                if result is not None:
                    sentence = f"the plan keeps it {typed}, which JAX has no rule for there"
                    self._say(instruction, less, value=number, sentence=sentence)
                    return result
        return None

    def _operands(
        self, instruction: Instruction, used: Sequence[TensorSharding | None], *, brings_all: bool
    ) -> list[TensorSharding]:
        """Types of its operands, those resharded that the plan moves; brings_all: or that it has otherwise at all."""
        given = []
        for number, (operand, use) in enumerate(zip(instruction.operands, used, strict=True)):
            types = self._types[operand]
            if len(types) != 1 or use is None:
                given.append(types[0] if types else TensorSharding(()))
                continue
            (typed,) = types
            if operand in self._free:
                is_merged = instruction.opcode not in _STRICT
                given.append(TensorSharding.replicated(len(use.dims)) if is_merged else use)
            elif (
                instruction in self._forward
                and operand not in self._backward
                and (brings_all or instruction not in self._after)
                and typed != use
                and (brings_all or _has_to_move(instruction, number, typed, use))
            ):
                if self._is_wanted_alike(operand, use):
                    self._say(operand, use, value=BROUGHT)
                    self._types[operand] = (use,)
                else:
                    self._say(instruction, use, value=instruction.operands.index(operand))
                given.append(use)
            else:
                given.append(typed)
        return given

    def _is_wanted_alike(self, value: Instruction, use: TensorSharding) -> bool:
        """Whether several read it, and all so: brought once, its cotangents are summed before they are brought back."""
        readers = [reader for reader in self._readers[value] if reader in self._forward]
        entries = [self._entries.get(reader.name) for reader in readers]
        if len(readers) < 2 or self._module.source(value) is None or not all(entries):
            return False
        uses = [
            sharding
            for reader, entry in zip(readers, entries, strict=True)
            for operand, sharding in zip(reader.operands, entry.operands if entry else (), strict=True)
            if operand is value
        ]
        return all(_reduced(sharding) == (use,) for sharding in uses)

    def _ask(self, instruction: Instruction, given: Sequence[TensorSharding]) -> TensorSharding | None:
        """JAX's type, or None where it wants to be told; the operands' common layout where no rule is asked."""
        try:
            result = self._rules.result(instruction, given)
        except AmbiguousTypeError:
            return None
        if result is None:
            return _reduced(self._entries[instruction.name].result)[0]
        return result

    def _call_result(self, instruction: Instruction) -> Instruction:
        """What a call hands out: an einsum's product is transposed behind it, in the same call."""
        own = self._module.source(instruction)
        if instruction.opcode != "dot" or own is None:
            return instruction
        transposed = [
            reader
            for reader in self._readers.get(instruction, ())
            if reader.opcode == "transpose" and reader in self._forward and reader.name in self._entries
        ]
        places = [self._module.source(reader) for reader in transposed]
        within = [
            reader
            for reader, place in zip(transposed, places, strict=True)
            if place and location_of(place) == location_of(own)
        ]
        return within[0] if within else instruction

    def _is_returned(self, instruction: Instruction) -> bool:
        readers = self._readers.get(instruction, ())
        return bool(readers) and all(reader is self._module.entry.root for reader in readers)

    def _note_partial(self, instruction: Instruction, result: Types) -> None:
        if result[0].unreduced:
            place = self._module.place(instruction) or instruction.name
            self.notes.append(
                f"{place}: the plan leaves a partial sum over {'·'.join(result[0].unreduced)} and reduces it later; "
                "here it is written reduced"
            )

    # ---- loops ----------------------------------------------------------------------------------

    def _loop(self, loop: Instruction, planned: Types) -> Types:
        """A scan or another loop: what it carries has one type, before it, in it and behind it."""
        (operand,) = loop.operands
        (body,), (condition,) = loop.called["body"], loop.called["condition"]
        initial = self._types[operand]
        values = operand.operands if operand.opcode == "tuple" else ()
        ends = body.root.operands if body.root.opcode == "tuple" else ()
        if len(values) != len(initial) or len(ends) != len(initial):
            types = planned
        else:
            types = tuple(
                self._carried(loop, number, end, start, plan)
                for number, (end, start, plan) in enumerate(zip(ends, initial, planned, strict=True))
            )
            self._stacked |= {
                end for value, end in zip(values, ends, strict=True) if value in self._free and _is_stacked(end, body)
            }
        for part in (condition, body):
            self._walk(part, types, self._viewed[operand], is_backward=False)
        return tuple(self._ended(end, typed, body) for end, typed in zip(ends, types, strict=False)) or types

    def _ended(self, end: Instruction, typed: TensorSharding, body: Computation) -> TensorSharding:
        """The type of one array behind a loop; where its body ends otherwise than it began, that is asked for."""
        if end in self._stacked:
            (update,) = self._types[end.operands[1]]
            return TensorSharding(((), *update.dims[1:])) if len(update.dims) == len(typed.dims) else typed
        (ended,) = self._types[end]
        if ended != typed and end not in self._free and not _is_handed_on(end, body):
            self._say(end, typed, value=BROUGHT)
        return typed

    def _carried(
        self, loop: Instruction, number: int, end: Instruction, start: TensorSharding, planned: TensorSharding
    ) -> TensorSharding:
        """The type of one array of a loop; where it starts otherwise, that is asked for."""
        (body,) = loop.called["body"]
        value = loop.operands[0].operands[number]
        if _is_handed_on(end, body):
            if value in self._free or not _loses_axes(start, planned):
                return start
            self._say(
                loop, planned, of=value, value=number, name=value.op_name or value.name, sentence="ahead of the loop"
            )
        elif value in self._free and _is_stacked(end, body):
            return planned
        elif start != planned and value in self._free and self._module.source(value) is None:
            name = f"initial {list(value.shape.leaves[0].dimensions)}"
            self._say(loop, planned, of=value, value=number, name=name, sentence="where it is made, ahead of the loop")
        elif start != planned:
            self._say(value, planned, value=RESULT if value in self._free else BROUGHT)
        return planned

    # ---- gradients ------------------------------------------------------------------------------

    def _remember(self, instruction: Instruction) -> None:
        """Types at a place, for the gradients of what is there."""
        location = self._module.source(instruction)
        if location is None:
            return
        for value in (instruction, *instruction.operands):
            for shape, typed in zip(value.shape.leaves, self._types[value], strict=False):
                key = (*location_of(location), shape.dimensions)
                if value not in self._free and value not in self._backward:
                    self._forward_types.setdefault(key, typed)

    def _gradient_type(self, instruction: Instruction, planned: Types) -> Types:
        location = self._module.source(instruction)
        if location is None or len(planned) != 1:
            return planned
        key = (*location_of(location), instruction.shape.leaves[0].dimensions)
        typed = self._forward_types.get(key, planned[0])
        readers = self._readers.get(instruction, ())
        if typed != planned[0] and any(not self._is_backward(reader, False) for reader in readers):
            self._gradients.append((instruction, planned[0], typed))
        return (typed,)


def _reduced(result: Types) -> Types:
    return tuple(TensorSharding(sharding.dims) if sharding.unreduced else sharding for sharding in result)


def _element(instruction: Instruction) -> tuple[int, int]:
    """Which arrays of a tuple a `get-tuple-element` takes: from, up to."""
    shape = instruction.operands[0].shape
    assert isinstance(shape, TupleShape)
    sizes = [len(element.leaves) for element in shape.elements]
    start = sum(sizes[: instruction.index])
    return start, start + sizes[instruction.index]


def _whole(instruction: Instruction) -> Types:
    return tuple(TensorSharding.replicated(shape.rank) for shape in instruction.shape.leaves)


def _loses_axes(typed: TensorSharding, used: TensorSharding) -> bool:
    """Whether a dimension is split over an axis that it is not split over any more."""
    return any(set(before) - set(after) for before, after in zip(typed.dims, used.dims, strict=True))


def _has_to_move(instruction: Instruction, number: int, typed: TensorSharding, used: TensorSharding) -> bool:
    """Whether a use is another than JAX would make of the type by itself."""
    if instruction.opcode == "dot":
        side = ("lhs", "rhs")[number]
        contracted = instruction.get(f"{side}_contracting_dims", ())
        if any(typed.dims[dim] != used.dims[dim] for dim in contracted):
            return True
    return _loses_axes(typed, used)


#: How names end of reshapes that the planner adds, to another view and back.
ADDED_RESHAPES = frozenset(["logical", "split", "stored"])

#: Operations whose operands JAX wants laid out alike.
_STRICT = frozenset(["concatenate", "dynamic-update-slice", "select-and-scatter"])


def _is_handed_on(end: Instruction, body: Computation) -> bool:
    """Whether a loop's body hands an array on as it came."""
    return end.opcode == "get-tuple-element" and end.operands[0] in body.parameters


def _is_stacked(end: Instruction, body: Computation) -> bool:
    """Whether a loop's body writes into it: what a scan stacks."""
    return end.opcode == "dynamic-update-slice" and _is_handed_on(end.operands[0], body)
