"""Undoes optimization: in text dumped after optimization, replaces compiler-made instructions by ordinary ones.

`graph.inlining` inlines fusions and calls. Here, in every computation:

- an asynchronous operation becomes the operation itself at its `-done`: `copy-start` … `copy-done` a copy,
  `async-start` … `async-done` a call of the wrapped computation, `slice-start` … `slice-done` a slice;
- a `bitcast` becomes a reshape between the dimensions in memory order, with transpositions before and after it when
  that is not the shape's order;
- the custom call `TopK` becomes a `topk`;
- a collective of one device, in a program without others, becomes a copy;
- `control-predecessors` are dropped: they are a schedule, and the planned program gets a new one.

Any other compiler-made instruction is refused: the text no longer says how to compute it, and a plan would replicate it
on every device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import ArrayShape, Attribute, Computation, Instruction, Module, without_layout
from shardwright.hlo.checks import find_problem
from shardwright.planner.graph.bitcasts import bitcast_steps
from shardwright.planner.graph.per_device_programs import REMEDY, is_optimized, is_single_device, location_of
from shardwright.planner.rewrites.edit import Names, attribute, computation_of, copy_of, int_list

#: Custom calls made by compilers from products, convolutions, sorts, …. Users' calls of similar names stay opaque:
#: `__cudnn$fmhaSoftmax`, `__gpu$xla.gpu.triton`.
_OF_COMPILERS = re.compile(
    r"ConcatBitcast|SliceBitcast|AllocateBuffer|__(?:cublas|hipblas|onednn|acl|cub|cusolver|cusparse)[$_]|__cudnn\$(?:conv|norm)|__triton|__gpu\$TopK|EigenMatMul",
    re.ASCII | re.IGNORECASE,
)
_TOP_K = "TopK"
_START, _UPDATE, _DONE = "-start", "-update", "-done"
#: Attributes of an asynchronous operation's execution.
_OF_ASYNC = frozenset({"async_execution_thread", "control-predecessors", "cross_program_prefetch_index"})
#: The note on text with fusions.
NOTE = (
    "the text was dumped after optimization: its fusions are planned as what they compute; XLA optimizes text from "
    "before optimization better"
)


def undo_optimization(module: Module) -> Module:
    """`module` without compiler-made instructions except fusions and calls; `module` itself without any.

    Raises UnsupportedProgramError, naming the instruction, when one cannot be translated exactly.
    """
    for instruction in module.instructions():
        target = instruction.get("custom_call_target") if instruction.opcode == "custom-call" else None
        if isinstance(target, str) and _OF_COMPILERS.match(target):
            raise _refusal(module, instruction, f"{target!r} stands for ordinary instructions")
    if not is_optimized(module) and not any(_needs_rewrite(candidate, module) for candidate in module.instructions()):
        return module
    return _Writer(module).run()


def _needs_rewrite(instruction: Instruction, module: Module) -> bool:
    opcode = instruction.opcode
    is_top_k = opcode == "custom-call" and instruction.get("custom_call_target") == _TOP_K
    return opcode.endswith(_START) or opcode == "bitcast" or is_top_k or is_single_device(instruction, module)


def _refusal(module: Module, instruction: Instruction, why: str) -> UnsupportedProgramError:
    message = f"the text was dumped after optimization: {instruction.name!r} ({instruction.opcode}): {why}"
    return UnsupportedProgramError(message, where=location_of(module, instruction), remedy=REMEDY)


class _Writer:
    """Rewrites every computation, callees first, in the text's order."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._names = Names(module)
        self._computations: dict[Computation, Computation] = {}
        self._made: dict[Instruction, Instruction] = {}
        self._started: dict[Instruction, Instruction] = {}  # the start behind each start and update

    def run(self) -> Module:
        module = self._module
        for computation in module.computations:
            self._computations[computation] = self._computation(computation)
        header = {name: attr for name, attr in module.header.items() if name != "is_scheduled"}
        computations = list(self._computations.values())
        return Module(module.name, header, computations, self._computations[module.entry], module.tables)

    def _computation(self, source: Computation) -> Computation:
        out: list[Instruction] = []
        for old in source:
            if old.opcode.endswith(_START):
                self._started[old] = old
            elif old.opcode.endswith(_UPDATE) and (start := self._start_of(old)) is not None:
                self._started[old] = start
            else:
                out += self._write(old)
                self._made[old] = out[-1]
        if source.root not in self._made:
            raise self._error_at(source.root, "it is never done")
        return computation_of(source, out, self._made[source.root])

    def _write(self, old: Instruction) -> Iterator[Instruction]:
        if old.opcode.endswith(_DONE) and (start := self._start_of(old)) is not None:
            yield self._finish_async(old, start)
        elif old.opcode == "bitcast":
            yield from self._bitcast(old)
        elif old.get("custom_call_target") == _TOP_K and old.opcode == "custom-call":
            yield self._top_k(old)
        elif is_single_device(old, self._module):
            yield self._alone(old)
        else:
            yield self._like(old, old, old.opcode)

    def _start_of(self, old: Instruction) -> Instruction | None:
        """The start of the asynchronous operation behind an update or a `-done`."""
        return self._started.get(old.operands[0]) if len(old.operands) == 1 else None

    # ---- one instruction as another --------------------------------------------------
    def _operands(self, old: Instruction) -> list[Instruction]:
        for operand in old.operands:
            if operand not in self._made:
                raise self._error_at(operand, f"{old.name!r} reads what is not done")
        return [self._made[operand] for operand in old.operands]

    def _like(self, old: Instruction, source: Instruction, opcode: str) -> Instruction:
        """`old` with the computation of `source`; refused when the result is invalid."""
        attributes = {name: attr for name, attr in source.attributes.items() if name not in _OF_ASYNC}
        if "metadata" in old.attributes:
            attributes["metadata"] = old.attributes["metadata"]
        called = {name: tuple(self._computations[callee] for callee in group) for name, group in source.called.items()}
        copy = copy_of(old, self._operands(source), opcode=opcode, attributes=attributes, called=called)
        problem = find_problem(copy)
        if problem is not None:
            raise self._error_at(old, problem)
        return copy

    def _plain(
        self, old: Instruction, opcode: str, operands: Sequence[Instruction], **attributes: Attribute
    ) -> Instruction:
        metadata = {name: old.attributes[name] for name in ("metadata",) if name in old.attributes}
        return copy_of(old, operands, opcode=opcode, attributes=attributes | metadata, called={})

    def _finish_async(self, done: Instruction, start: Instruction) -> Instruction:
        operation = start.opcode.removesuffix(_START)
        if operation != "async":
            return self._like(done, start, operation)
        (wrapped,) = (self._computations[callee] for callee in start.called["calls"])
        operands = self._operands(start)
        takes = [without_layout(value.shape) for value in wrapped.parameters]
        gives = without_layout(wrapped.root.shape)
        if takes != [without_layout(value.shape) for value in operands] or gives != without_layout(done.shape):
            raise self._error_at(done, f"{wrapped.name!r} takes or gives other shapes")
        call = self._plain(done, "call", operands, to_apply=attribute("to_apply", f"%{wrapped.name}"))
        call.called = {"to_apply": (wrapped,)}
        return call

    def _top_k(self, old: Instruction) -> Instruction:
        operands = self._operands(old)
        searched = [leaf.dimensions for operand in operands for leaf in operand.shape.leaves]
        results = [leaf.dimensions for leaf in old.shape.leaves]
        if len(searched) != 1 or len(results) != 2 or not all(d and d[:-1] == searched[0][:-1] for d in results):
            raise self._error_at(old, "it does not search the last dimension of one array")
        k, largest = attribute("k", str(results[0][-1])), attribute("largest", "true")
        return self._plain(old, "topk", operands, k=k, largest=largest)

    def _alone(self, old: Instruction) -> Instruction:
        operands = self._operands(old)
        if len(operands) != 1 or without_layout(operands[0].shape) != without_layout(old.shape):
            raise self._error_at(old, "a collective of one device over several arrays")
        return self._plain(old, "copy", operands)

    # ---- bitcasts ----------------------------------------------------------------------
    def _bitcast(self, old: Instruction) -> Iterator[Instruction]:
        (value,) = self._operands(old)
        before, after = value.shape, old.shape
        steps = (
            bitcast_steps(before, after) if isinstance(before, ArrayShape) and isinstance(after, ArrayShape) else None
        )
        if steps is None:
            raise self._error_at(old, "the layouts do not say which element becomes which")
        for number, step in enumerate(steps, start=1):
            dimensions = {"dimensions": int_list("dimensions", step.dimensions)} if step.opcode == "transpose" else {}
            replacement = self._plain(old, step.opcode, [value], **dimensions)
            if number == len(steps):
                replacement.shape = after
            else:
                replacement.name, replacement.shape = self._names.like(old.name, "view"), step.shape
            yield replacement
            value = replacement

    def _error_at(self, instruction: Instruction, why: str) -> UnsupportedProgramError:
        return _refusal(self._module, instruction, why)
