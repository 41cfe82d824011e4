"""What a module that XLA:GPU has optimized and scheduled does on one device: the judge of plans for GPUs.

As `counter` it reads XLA's text with expressions of its own and shares no code with the planner.

Counting rules
- A collective counts as it is issued: one that the combiner made of many is one, its payload their sum. Synchronous,
  started and done apart, or wrapped by an `async-start`; loops count their trips.
- Every fusion, copy, sort and call of a library is a kernel. A fusion reads of each parameter the part that its root
  needs (slices and gathers need what they give), and writes its results; an update in place writes the update.
- Calls of cuBLAS and cuDNN count two operations a multiply-add, by the dimension numbers they carry. They read all
  operands (bias, the array that is added to) and write all results but their workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from benchmarks.planner.counter import KINDS, CollectiveKey, Counted, KernelKey, put_together
from benchmarks.planner.groups import collective_groups
from benchmarks.planner.library_calls import call_flops, result_bytes
from benchmarks.planner.loops import trip_count
from benchmarks.planner.partitioned_text import CountingError, Instruction, Module, read_module
from benchmarks.planner.products import convolution_flops, dot_flops

#: Views and bookkeeping: no kernel, no bytes.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
    "partition-id", "replica-id", "domain", "copy-done", "async-update", "async-done",
    "all-reduce-done", "all-gather-done", "collective-permute-done",
})  # fmt: skip

#: Give a part of their first operand and need no more of it.
_PARTS = frozenset({"slice", "dynamic-slice", "gather"})

#: Need all of their operands for any part of their result.
_WHOLE = frozenset({"dot", "convolution", "reduce-window", "select-and-scatter", "sort", "fusion", "custom-call"})

#: Transfers whose size or partner the text does not say.
_NOT_COUNTED = frozenset({"send", "recv", "infeed", "outfeed"})


def count_gpu(hlo_text: str, device_count: int) -> Counted:
    """Count an optimized module of `device_count` devices.

    Raises CountingError for text it cannot read and for a loop whose trips it cannot tell.
    """
    module = read_module(hlo_text)
    counting = _Counting(module, device_count)
    counting.visit(module.entry, 1)
    return put_together(counting.collectives, counting.kernels)


@dataclass
class _Counting:
    module: Module
    device_count: int
    collectives: Counter[CollectiveKey] = field(default_factory=Counter)
    kernels: Counter[KernelKey] = field(default_factory=Counter)

    def visit(self, computation: str, runs: int) -> None:
        body = self.module.computations[computation]
        for instruction in body.values():
            opcode = instruction.opcode
            if opcode == "while":
                self.visit(instruction.attribute("body"), runs * trip_count(instruction, self.module, computation))
            elif opcode == "conditional":  # all branches: which one runs is not known here
                for branch in instruction.branches():
                    self.visit(branch, runs)
            elif opcode == "async-start":
                self.visit(instruction.attribute("calls"), runs)
            elif opcode in KINDS:
                self._collective(KINDS[opcode], instruction, body, runs)
            elif opcode in _NOT_COUNTED:
                raise CountingError(f"{opcode} {instruction.name} is not counted")
            elif opcode not in _FREE:
                self.kernels[self._kernel(instruction, body)] += runs

    def _collective(self, kind: str, instruction: Instruction, body: dict[str, Instruction], runs: int) -> None:
        groups = collective_groups(instruction, self.device_count)
        arrays = instruction.operands[:1] if instruction.opcode == "ragged-all-to-all" else instruction.operands
        size = sum(body[name].size_bytes for name in arrays)
        if kind != "collective-permute":
            members = max(map(len, groups))
            if members <= 1:
                return
            size *= members if kind == "all-gather" else 1
        elif all(source == target for source, target in groups):
            return
        self.collectives[kind, size, groups] += runs

    def _kernel(self, instruction: Instruction, body: dict[str, Instruction]) -> KernelKey:
        if instruction.opcode == "fusion":
            inner = self.module.computations[instruction.attribute("calls")]
            return *_products(inner), float(_fused_bytes(inner))
        operand_bytes = sum(body[name].size_bytes for name in dict.fromkeys(instruction.operands))
        if instruction.opcode == "custom-call":
            product_type, flops = call_flops(instruction, body)
            return product_type, flops, float(operand_bytes + result_bytes(instruction))
        if instruction.opcode == "copy-start":
            return "", 0.0, 2.0 * operand_bytes
        alone = {name: body[name] for name in instruction.operands} | {instruction.name: instruction}
        return *_products(alone), float(_bytes(alone, instruction, frozenset(instruction.operands)))


def _products(body: dict[str, Instruction]) -> tuple[str, float]:
    """(element type, operations) of the products among some instructions; "" where there are none."""
    kind, flops = "", 0.0

    def dims(name: str) -> tuple[int, ...]:
        return body[name].dims

    for instruction in body.values():
        if instruction.opcode in ("dot", "convolution") and instruction.operands[0] in body:
            flops += (dot_flops if instruction.opcode == "dot" else convolution_flops)(instruction, dims)
            kind = body[instruction.operands[0]].element_type
    return kind, flops


def _fused_bytes(body: dict[str, Instruction]) -> int:
    root = next(instruction for instruction in body.values() if instruction.is_root)
    return _bytes(body, root, frozenset(name for name, each in body.items() if each.opcode == "parameter"))


def _bytes(body: dict[str, Instruction], root: Instruction, inputs: frozenset[str]) -> int:
    """Bytes from and to memory of the kernel that computes `root` from `inputs`."""
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    updated = {}  # in place → what is written
    for result in results:
        update = _through_bitcasts(result, body, inputs)
        if update.name not in inputs and _is_in_place(update, body, inputs):
            updated[result.name] = update
    written = sum(
        _updates_bytes(updated[result.name], body) if result.name in updated else result.size_bytes
        for result in results
    )
    needed = _needed(body, root, inputs, frozenset(update.name for update in updated.values()))
    return written + round(sum(needed[name] * body[name].size_bytes for name in inputs if name in needed))


def _through_bitcasts(value: Instruction, body: dict[str, Instruction], inputs: frozenset[str]) -> Instruction:
    while value.opcode == "bitcast" and value.name not in inputs:
        value = body[value.operands[0]]
    return value


def _is_in_place(update: Instruction, body: dict[str, Instruction], inputs: frozenset[str]) -> bool:
    """Whether an update of an array is made where it lies: the kernel gets it from memory, and hands it back."""
    if update.opcode not in ("dynamic-update-slice", "scatter"):
        return False
    return _through_bitcasts(body[update.operands[0]], body, inputs).name in inputs


def _updates_bytes(update: Instruction, body: dict[str, Instruction]) -> int:
    """Written by an update in place; what a scatter combines with is read there first."""
    if update.opcode == "dynamic-update-slice":
        return body[update.operands[1]].size_bytes
    return 2 * sum(body[name].size_bytes for name in update.operands[_arrays(update) + 1 :])


def _arrays(scatter: Instruction) -> int:
    return (len(scatter.operands) - 1) // 2


def _needed(
    body: dict[str, Instruction], root: Instruction, inputs: frozenset[str], in_place: frozenset[str]
) -> dict[str, float]:
    """name → part of it, at most 1, that the kernel needs; all of its root."""
    needed = {root.name: 1.0}
    for name in reversed(body):  # readers stand below what they read
        part = needed.get(name, 0.0)
        if not part or name in inputs:
            continue
        for operand, share in _shares(body[name], body, min(part, 1.0), name in in_place):
            needed[operand] = min(1.0, needed.get(operand, 0.0) + share)
    return needed


def _shares(
    instruction: Instruction, body: dict[str, Instruction], part: float, in_place: bool
) -> Iterator[tuple[str, float]]:
    """Parts of its operands that a part of an instruction needs."""
    left_alone = ()
    if in_place:
        count = 1 if instruction.opcode == "dynamic-update-slice" else _arrays(instruction)
        left_alone = instruction.operands[:count]
    for place, operand in enumerate(instruction.operands):
        if place < len(left_alone):
            continue
        if instruction.opcode in _WHOLE or instruction.opcode == "scatter":
            yield operand, 1.0
        elif instruction.opcode == "tuple" or (instruction.opcode == "dynamic-update-slice" and place):
            yield operand, part
        else:
            growth = _elements(instruction) / max(1, _elements(body[operand]))
            is_part = instruction.opcode in _PARTS and place == 0
            yield operand, min(1.0, part * (growth if is_part else max(1.0, growth)))


def _elements(instruction: Instruction) -> int:
    return prod(instruction.dims)
