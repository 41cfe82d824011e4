"""Counts an optimized XLA module's work on one device: bytes on the wire, arithmetic, memory traffic.

The judge of the benchmark. It reads XLA's text with regular expressions of its own and shares no code with the planner:
a mistake there cannot hide here. Texts of XLA:GPU and XLA:CPU are read alike.

Counting rules
- Collectives count per issue. A combined collective is one, its payload the sum. Forms: synchronous, start and done, or
  wrapped by an `async-start`. Loops count their trips.
- Every fusion, copy, sort and library call is a kernel. A fusion reads the part of each parameter needed by its root
  (slices and gathers need their results' elements) and writes its results; an update in place writes the update.
- Calls of cuBLAS and cuDNN count two operations a multiply-add, from their dimension numbers. They read all operands
  (bias and accumulator, too) and write all results but their workspace.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.planner.counted import CollectiveKey, KernelKey, ProgramCounts, build_counts
from benchmarks.planner.groups import parse_collective_groups
from benchmarks.planner.library_calls import call_flops, result_bytes
from benchmarks.planner.loops import trip_count
from benchmarks.planner.partitioned_text import CountingError, Instruction, Module, read_module
from benchmarks.planner.products import convolution_flops, dot_flops
from benchmarks.planner.traffic import Body, count_fused_bytes, count_moved_bytes, kind_of

KINDS = {
    "all-reduce": "all-reduce", "all-reduce-start": "all-reduce",
    "all-gather": "all-gather", "all-gather-start": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all", "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute", "collective-permute-start": "collective-permute",
    "collective-broadcast": "collective-permute",
}  # fmt: skip

#: Views and bookkeeping: no kernel, no bytes.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
    "partition-id", "replica-id", "domain", "copy-done", "async-update", "async-done",
    "all-reduce-done", "all-gather-done", "collective-permute-done",
})  # fmt: skip

#: Transfers without size or partner in the text.
_NOT_COUNTED = frozenset({"send", "recv", "infeed", "outfeed"})


def count(hlo_text: str, device_count: int) -> ProgramCounts:
    """Count an optimized module of `device_count` devices.

    Raises CountingError for unreadable text and for a loop of unknown trip count.
    """
    module = read_module(hlo_text)
    counter = ProgramCounter(module, device_count)
    counter.visit(module.entry, 1)
    return build_counts(counter.collectives, counter.kernels)


@dataclass
class ProgramCounter:
    """Running counts of the visited instructions of a module."""

    module: Module
    device_count: int
    collectives: Counter[CollectiveKey] = field(default_factory=Counter)
    kernels: Counter[KernelKey] = field(default_factory=Counter)

    def visit(self, computation: str, runs: int) -> None:
        body = self.module.computations[computation]
        for instruction in body.values():
            self.add(instruction, body, runs)

    def add(self, instruction: Instruction, body: Body, runs: int) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self.visit(instruction.attribute("body"), runs * trip_count(instruction))
        elif opcode == "conditional":  # all branches: the taken one is unknown
            for branch in instruction.branches():
                self.visit(branch, runs)
        elif opcode == "async-start":
            self.visit(instruction.attribute("calls"), runs)
        elif opcode in KINDS:
            self._add_collective(KINDS[opcode], instruction, body, runs)
        elif opcode in _NOT_COUNTED:
            raise CountingError(f"{opcode} {instruction.name} is not counted")
        elif opcode not in _FREE:
            self.kernels[self._count_kernel(instruction, body)] += runs

    def _add_collective(self, kind: str, instruction: Instruction, body: Body, runs: int) -> None:
        groups = parse_collective_groups(instruction, self.device_count)
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

    def _count_kernel(self, instruction: Instruction, body: Body) -> KernelKey:
        if instruction.opcode == "fusion":
            inner = self.module.computations[instruction.attribute("calls")]
            return *_count_products(inner), float(count_fused_bytes(inner)), kind_of(inner)
        operand_bytes = sum(body[name].size_bytes for name in dict.fromkeys(instruction.operands))
        if instruction.opcode == "custom-call":
            product_type, flops = call_flops(instruction, body)
            return product_type, flops, float(operand_bytes + result_bytes(instruction)), "call"
        if instruction.opcode == "copy-start":
            return "", 0.0, 2.0 * operand_bytes, "copy"
        operands_and_result = {name: body[name] for name in instruction.operands} | {instruction.name: instruction}
        moved_bytes = float(count_moved_bytes(operands_and_result, instruction, frozenset(instruction.operands)))
        return *_count_products(operands_and_result), moved_bytes, instruction.opcode


def _count_products(body: Body) -> tuple[str, float]:
    """(element type, operations) of the products among some instructions; "" without any."""
    kind, flops = "", 0.0

    def dims(name: str) -> tuple[int, ...]:
        return body[name].dims

    for instruction in body.values():
        if instruction.opcode in ("dot", "convolution") and instruction.operands[0] in body:
            flops += (dot_flops if instruction.opcode == "dot" else convolution_flops)(instruction, dims)
            kind = body[instruction.operands[0]].element_type
    return kind, flops
