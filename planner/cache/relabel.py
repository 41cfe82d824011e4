"""The names of a program, apart from its computation; and a plan relabeled with another program's names.

Two programs may differ only in names of instructions, scopes and arguments, and in source lines. Exchanging every name
turns a plan of one into a plan of the other. Instruction and variable names are matched by position. In text (causes,
notes) a changed name is replaced when it cannot be a common word; otherwise `Relabeler.relabel` gives up without
guessing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from shardwright.hlo import Attribute, Instruction, Module, parse
from shardwright.planner.graph.inlining import with_callee_names
from shardwright.planner.graph.scopes import scopes_of
from shardwright.planner.plans.causes import is_backward
from shardwright.plans.plan import InstructionPlan, Plan

_WORD = re.compile(r"[\w.\-]+")

#: A token between blanks and parentheses; trailing punctuation belongs to the sentence.
_TOKEN = re.compile(r"[^\s(),]+")
_PUNCTUATION = ".:;"

#: Marks of names: `dot.5`, `params['w']`, `model.py:63`. (`dot` and `x` may be words.)
_UNMISTAKABLE = re.compile(r"\w\.\w|[\[:]")


class RelabelError(Exception):
    """The plan mentions a name without a certain new name."""


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Origin of instructions: printed metadata, its `op_name`, and the user's `file.py:line`."""

    metadata: str
    op_name: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramNames:
    """All names of a module, in text order.

    module: its name.
    computations / instructions: their names.
    place_of: per instruction its index in `places`.
    places: distinct source locations.
    arguments / outputs: names per flat array leaf.
    """

    module: str
    computations: tuple[str, ...]
    instructions: tuple[str, ...]
    place_of: tuple[int, ...]
    places: tuple[SourceLocation, ...]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, module: Module, arguments: Sequence[str], outputs: Sequence[str]) -> ProgramNames:
        places: dict[SourceLocation, int] = {}
        position_of: dict[int, int] = {}  # by identity of the metadata: attributes are interned
        place_of = []
        for instruction in module.instructions():
            metadata = instruction.attributes.get("metadata")
            position = position_of.get(id(metadata))
            if position is None:
                position = position_of[id(metadata)] = places.setdefault(
                    _source_location(module, instruction), len(places)
                )
            place_of.append(position)
        return cls(
            module=module.name,
            computations=tuple([computation.name for computation in module.computations]),
            instructions=tuple([instruction.name for instruction in module.instructions()]),
            place_of=tuple(place_of),
            places=tuple(places),
            arguments=tuple(arguments),
            outputs=tuple(outputs),
        )

    def encode(self) -> dict[str, Any]:
        """Plain JSON data, the input of `decode`."""
        return {name: getattr(self, name) for name in ProgramNames.__slots__ if name != "places"} | {
            "places": [[place.metadata, place.op_name, place.line] for place in self.places]
        }

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> ProgramNames:
        return cls(
            module=data["module"],
            computations=tuple(data["computations"]),
            instructions=tuple(data["instructions"]),
            place_of=tuple(data["place_of"]),
            places=tuple([SourceLocation(*place) for place in data["places"]]),
            arguments=tuple(data["arguments"]),
            outputs=tuple(data["outputs"]),
        )


def _source_location(module: Module, instruction: Instruction) -> SourceLocation:
    metadata = instruction.attributes.get("metadata")
    return SourceLocation(metadata.text if metadata else "", instruction.op_name, module.place(instruction))


class Relabeler:
    """Translates plans of one program to an equal program's names.

    Raises RelabelError when the programs differ in size or scopes, or only one has source lines.
    """

    def __init__(self, old: ProgramNames, new: ProgramNames) -> None:
        self._new = new
        self._names = dict(_pairs(old.instructions, new.instructions))
        self._computations = dict(_pairs(old.computations, new.computations))
        self._is_renamed = old.instructions != new.instructions or old.computations != new.computations
        self._used_names = set(new.instructions)
        self._position = {name: position for position, name in enumerate(old.instructions)}
        self._places: dict[str, set[SourceLocation]] = {}  # by old metadata
        self._dropped_words: set[str] = set()  # words of renamed scopes
        called: dict[str, set[str]] = {}  # name possibly mentioned in text → new names
        for before, after in {*_pairs(old.place_of, new.place_of)}:
            here, there = old.places[before], new.places[after]
            if bool(here.line) != bool(there.line) or is_backward(here.op_name) != is_backward(there.op_name):
                raise RelabelError("one of the programs says less of where it comes from")
            if here.op_name != there.op_name and scopes_of(here.op_name) != scopes_of(there.op_name):
                raise RelabelError("segments are called by scopes, and which are in one is not known here")
            self._places.setdefault(here.metadata, set()).add(there)
            self._dropped_words |= _find_dropped_words(here.op_name, there.op_name)
            called.setdefault(here.line, set()).add(there.line)
        for before, after in (
            *self._names.items(),
            *self._computations.items(),
            *_pairs(old.arguments, new.arguments),
            *_pairs(old.outputs, new.outputs),
            (old.module, new.module),
        ):
            called.setdefault(before, set()).add(after)
        called.pop("", None)
        self._renamed = {before: after for before, after in called.items() if after != {before}}
        self._unchanged = called.keys() - self._renamed.keys()
        self._unreadable = [name for name in self._renamed if not _TOKEN.fullmatch(name)]

    # ---- the plan ------------------------------------------------------------
    def relabel(self, plan: Plan, module: Module, text: str) -> tuple[Plan, Module]:
        """`plan` in the names of `module` (with text `text`), and the planned program: `module` or its rewrite. Raises
        RelabelError."""
        planned = self._relabel_program(plan.require_hlo(), module) if plan.original_sha256 else module
        hlo_text = planned.to_text() if plan.original_sha256 else text
        digest = sha256(text.encode()).hexdigest()
        relabelled = replace(
            plan,
            module_name=module.name,
            hlo_text=hlo_text,
            hlo_sha256=sha256(hlo_text.encode()).hexdigest(),
            original_sha256=digest if plan.original_sha256 else "",
            instructions=self._relabel_instructions(plan.instructions),
            parameters=_rename_variables(plan.parameters, self._new.arguments),
            outputs=_rename_variables(plan.outputs, self._new.outputs),
            collectives=tuple([
                replace(moved, instruction=self._new_name(moved.instruction), cause=self.relabel_text(moved.cause))
                for moved in plan.collectives
            ]),
            cost=replace(plan.cost, bound_scope=self.relabel_text(plan.cost.bound_scope)),
            candidates=tuple([replace(other, note=self.relabel_text(other.note)) for other in plan.candidates]),
            segments=tuple([
                replace(segment, name=self.relabel_text(segment.name),
                        boundary=tuple([(self._new_name(name), sharding) for name, sharding in segment.boundary]))
                for segment in plan.segments
            ]),
            recomputed=tuple([replace(segment, name=self.relabel_text(segment.name)) for segment in plan.recomputed]),
            attention=tuple([
                replace(note, place=self.relabel_text(note.place), reason=self.relabel_text(note.reason))
                for note in plan.attention
            ]),
            kernels=tuple([replace(note, place=self.relabel_text(note.place)) for note in plan.kernels]),
            regions=tuple([replace(note, place=self.relabel_text(note.place)) for note in plan.regions]),
            notes=tuple([self.relabel_text(note) for note in plan.notes]),
        )  # fmt: skip
        return relabelled, planned

    def _relabel_instructions(self, instructions: tuple[InstructionPlan, ...]) -> tuple[InstructionPlan, ...]:
        reasons = {reason: self.relabel_text(reason) for reason in {instruction.reason for instruction in instructions}}
        if not self._is_renamed and all(reason == said for reason, said in reasons.items()):
            return instructions
        return tuple(
            [
                replace(
                    instruction,
                    computation=self._computations.get(instruction.computation, instruction.computation),
                    name=self._new_name(instruction.name),
                    reason=reasons[instruction.reason],
                )
                for instruction in instructions
            ]
        )

    def _new_name(self, name: str) -> str:
        """The new name of an instruction; a rewrite's own instruction keeps its name when unused."""
        new_name = self._names.get(name)
        if new_name is None and name in self._used_names:
            raise RelabelError(f"two instructions would be called {name}")
        return name if new_name is None else new_name

    def relabel_text(self, text: str) -> str:
        """`text` with every changed name replaced. Raises RelabelError on a name that is a common word or ambiguous."""
        if not (self._renamed or self._dropped_words):
            return text
        if any(name in text for name in self._unreadable):
            raise RelabelError(f"{text!r} mentions a name with blanks or parentheses")
        return _TOKEN.sub(lambda match: self._relabel_token(match[0]), text)

    def _relabel_token(self, token: str) -> str:
        name = token.rstrip(_PUNCTUATION)
        if name in self._unchanged:
            return token
        if name in self._renamed:
            new_names = self._renamed[name]
            if len(new_names) == 1 and _UNMISTAKABLE.search(name):
                return next(iter(new_names)) + token[len(name) :]
        elif not any(word in self._renamed or word in self._dropped_words for word in _WORD.findall(token)):
            return token
        raise RelabelError(f"it is not certain what {token!r} is called now")

    # ---- a rewritten program ---------------------------------------------------
    def _relabel_program(self, text: str, module: Module) -> Module:
        """A program rewritten from the old one, with the names and source lines of `module`."""
        rewritten = parse(text)
        metadata = [instruction.attributes.get("metadata") for instruction in module.instructions()]
        by_text = {attribute.text: attribute for attribute in metadata if attribute is not None}
        for computation in rewritten.computations:
            computation.name = self._computations.get(computation.name, computation.name)
        for instruction in rewritten.instructions():
            if "control-predecessors" in instruction.attributes:
                raise RelabelError("instructions are ordered by name")
            position = self._position.get(instruction.name)
            attribute = self._metadata(instruction, by_text) if position is None else metadata[position]
            instruction.attributes.pop("metadata", None)
            if attribute is not None:
                instruction.attributes["metadata"] = attribute
            instruction.name = self._new_name(instruction.name)
            for name, callees in instruction.called.items():
                instruction.attributes[name] = with_callee_names(instruction.attributes[name], callees)
        return Module(module.name, rewritten.header, rewritten.computations, rewritten.entry, module.tables)

    def _metadata(self, instruction: Instruction, by_text: Mapping[str, Attribute]) -> Attribute | None:
        """Metadata of a rewrite's instruction: that of its original."""
        old = instruction.attributes.get("metadata")
        places = self._places.get(old.text, set()) if old is not None else set()
        return by_text.get(next(iter(places)).metadata) if len(places) == 1 else None


def _pairs(old: Sequence[Any], new: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    if len(old) != len(new):
        raise RelabelError(f"{len(old)} names, {len(new)} now")
    return zip(old, new, strict=True)


def _rename_variables(variables: Sequence[Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(replace(variable, name=name) for variable, name in _pairs(variables, names))


def _find_dropped_words(before: str, after: str) -> set[str]:
    """Words of a scope path absent at the same position of its new name."""
    if before == after:
        return set()
    old, new = before.split("/"), after.split("/")
    if len(old) != len(new):
        return set(_WORD.findall(before))
    return {word for a, b in zip(old, new, strict=True) for word in {*_WORD.findall(a)} - {*_WORD.findall(b)}}
