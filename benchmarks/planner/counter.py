"""What a partitioned HLO module does on one device: bytes on the wire, arithmetic, memory traffic.

The judge of the benchmark: it reads XLA's text with regular expressions of its own and
shares no code with the planner, so that a mistake there cannot hide here.

Counting rules
- A collective counts once for each run of its computation; loops count their trips.
- An all-reduce whose every reader keeps this device's slice of it is a reduce-scatter, as XLA:GPU and
  XLA:TPU make it (ReduceScatterCreator); XLA:CPU leaves the pair.
- Elementwise chains are fused: a value is written to memory only where several instructions read it, or one that
  is no part of a fused kernel (a product, a collective, a scatter, the result).
- Products and convolutions count two operations a multiply-add; taps of a convolution on padding or on the
  holes of a dilated operand do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from benchmarks.planner.groups import Groups, collective_groups
from benchmarks.planner.loops import trip_count
from benchmarks.planner.partitioned_text import Instruction, Module, read_module
from benchmarks.planner.products import convolution_flops, dot_flops

KINDS = {
    "all-reduce": "all-reduce", "all-reduce-start": "all-reduce",
    "all-gather": "all-gather", "all-gather-start": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all", "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute", "collective-permute-start": "collective-permute",
    "collective-broadcast": "collective-permute",
}  # fmt: skip

#: (kind, payload bytes, groups) and (element type of a product or "", operations, bytes).
CollectiveKey = tuple[str, int, Groups]
KernelKey = tuple[str, float, float]

#: Views and bookkeeping: no kernel, no bytes. What reads a transpose takes it in; copies are left by constraints.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert", "reshape", "after-all",
    "add-dependency", "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "domain",
    "all-reduce-done", "all-gather-done", "collective-permute-done", "while", "conditional", "copy", "transpose",
})  # fmt: skip

#: Kernels of their own: they read whole operands from memory.
_ALONE = frozenset({
    "dot", "convolution", "scatter", "sort", "custom-call", "fft", "cholesky", "triangular-solve", "select-and-scatter",
    "rng-bit-generator", "topk", "ragged-dot", "dynamic-update-slice", *KINDS,
})  # fmt: skip

#: End a fused kernel: they read their operands through it, and write their result.
_ENDS = frozenset({"reduce", "reduce-window"})

#: Made anew wherever they are read; writing them would cost more than computing them.
_CHEAP = frozenset({"broadcast", "iota"})

#: Read no more than they give.
_PARTS = frozenset({"slice", "dynamic-slice", "gather"})


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of one device's program.

    payload_bytes: the whole array of an all-reduce, all-gather or reduce-scatter; one device's operand
        of an all-to-all or a permute.
    groups: device positions that work together; for a permute, its (source, target) pairs.
    count: runs a step.
    """

    kind: str
    payload_bytes: int
    groups: tuple[tuple[int, ...], ...]
    count: int = 1

    @property
    def group_size(self) -> int:
        return 2 if self.kind == "collective-permute" else max(map(len, self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """Bytes one device sends for one run, by the ring algorithms (Thakur, Rabenseifner, Gropp, 2005)."""
        if self.kind == "collective-permute":
            return float(self.payload_bytes)
        share = (self.group_size - 1) / self.group_size
        return self.payload_bytes * share * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of one device's program: arithmetic, bytes to and from memory, runs a step.

    product_type: element type of a product's or convolution's operands; None for other kernels.
    """

    flops: float
    bytes: float
    product_type: str | None = None
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Counted:
    """All that one device does in a step, equal collectives and kernels put together."""

    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]

    @property
    def wire_bytes(self) -> float:
        return sum(c.wire_bytes * c.count for c in self.collectives)

    @property
    def product_flops(self) -> float:
        return sum(k.flops * k.count for k in self.kernels if k.product_type)

    @property
    def memory_bytes(self) -> float:
        return sum(k.bytes * k.count for k in self.kernels)

    def wire_by_kind(self) -> dict[str, tuple[int, float]]:
        """kind → (runs a step, wire bytes a step)."""
        found: dict[str, tuple[int, float]] = {}
        for c in self.collectives:
            runs, sent = found.get(c.kind, (0, 0.0))
            found[c.kind] = (runs + c.count, sent + c.wire_bytes * c.count)
        return dict(sorted(found.items()))


def count(hlo_text: str, device_count: int) -> Counted:
    """Count a partitioned module of `device_count` devices.

    Raises CountingError for text it cannot read and for a loop whose trips it cannot tell.
    """
    module = read_module(hlo_text)
    counting = _Counting(module, device_count)
    counting.visit(module.entry, 1)
    return put_together(counting.collectives, counting.kernels)


def put_together(collectives: Counter[CollectiveKey], kernels: Counter[KernelKey]) -> Counted:
    """What was counted, in an order of its own."""
    return Counted(
        collectives=tuple(
            Collective(kind=kind, payload_bytes=size, groups=groups, count=runs)
            for (kind, size, groups), runs in sorted(collectives.items())
        ),
        kernels=tuple(
            Kernel(flops=flops, bytes=size, product_type=kind or None, count=runs)
            for (kind, flops, size), runs in sorted(kernels.items())
        ),
    )


@dataclass
class _Counting:
    module: Module
    device_count: int
    collectives: Counter[CollectiveKey] = field(default_factory=Counter)
    kernels: Counter[KernelKey] = field(default_factory=Counter)

    def visit(self, computation: str, runs: int) -> None:
        body = _Body(self.module, computation)
        for instruction in body.instructions.values():
            self._called(instruction, body, runs)
            kind = KINDS.get(instruction.opcode)
            if kind is not None:
                self._collective(kind, instruction, body, runs)
            elif body.is_written(instruction):
                self._kernel(instruction, body, runs)

    def _called(self, instruction: Instruction, body: _Body, runs: int) -> None:
        if instruction.opcode == "while":
            trips = trip_count(instruction, self.module, body.name)
            self.visit(instruction.attribute("body"), runs * trips)
        elif instruction.opcode == "conditional":  # all branches: which one runs is not known here
            for branch in instruction.branches():
                self.visit(branch, runs)

    def _collective(self, kind: str, instruction: Instruction, body: _Body, runs: int) -> None:
        groups = collective_groups(instruction, self.device_count)
        size = sum(body.size(operand) for operand in instruction.operands)
        if kind != "collective-permute":
            members = max(map(len, groups))
            if members <= 1:
                return
            if kind == "all-gather":
                size *= members
            elif kind == "all-reduce" and body.is_scattered(instruction, members):
                kind = "reduce-scatter"
        elif all(source == target for source, target in groups):
            return
        self.collectives[kind, size, groups] += runs

    def _kernel(self, instruction: Instruction, body: _Body, runs: int) -> None:
        moved = float(body.traffic(instruction))
        if instruction.opcode == "dot":
            self.kernels[body.operand_type(instruction), dot_flops(instruction, body.dims), moved] += runs
        elif instruction.opcode == "convolution":
            self.kernels[body.operand_type(instruction), convolution_flops(instruction, body.dims), moved] += runs
        else:
            self.kernels["", 0.0, moved] += runs


class _Body:
    """One computation, with who reads what and what is written to memory."""

    def __init__(self, module: Module, name: str) -> None:
        self.module = module
        self.name = name
        self.instructions = module.computations[name]
        self.readers: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                self.readers.setdefault(operand, []).append(instruction)

    # ---- sizes -----------------------------------------------------------
    def size(self, name: str) -> int:
        return self.instructions[name].size_bytes

    def dims(self, name: str) -> tuple[int, ...]:
        return self.instructions[name].dims

    def operand_type(self, instruction: Instruction) -> str:
        return self.instructions[instruction.operands[0]].element_type

    # ---- fusion ----------------------------------------------------------
    def is_written(self, instruction: Instruction) -> bool:
        """Whether the instruction ends a kernel, so that its result goes to memory."""
        if instruction.opcode in _FREE or instruction.size_bytes == 0 or self._is_cheap(instruction):
            return False
        if instruction.opcode in _ALONE or instruction.opcode in _ENDS:
            return True
        readers = list(self._kernels_reading(instruction.name))
        return len(readers) != 1 or readers[0] is None or readers[0].opcode in _ALONE

    def _is_cheap(self, instruction: Instruction) -> bool:
        """A broadcast, or a part or view of one: XLA makes the part at once."""
        while instruction.opcode in _PARTS or instruction.opcode in ("copy", "reshape", "transpose", "bitcast"):
            instruction = self.instructions[instruction.operands[0]]
        return instruction.opcode in _CHEAP

    def _kernels_reading(self, name: str) -> Iterator[Instruction | None]:
        """Instructions that read a value, looking through views; None for what leaves the computation."""
        if self.instructions[name].is_root:
            yield None
        for reader in self.readers.get(name, ()):
            if reader.opcode in ("tuple", "while", "conditional"):
                yield None
            elif reader.opcode in _FREE:
                yield from self._kernels_reading(reader.name)
            else:
                yield reader

    def traffic(self, instruction: Instruction) -> int:
        """Bytes that the kernel ending in `instruction` reads and writes."""
        operands = instruction.operands
        if instruction.opcode == "dynamic-update-slice":  # in place: only the update moves
            return 2 * self.size(operands[1])
        if instruction.opcode == "scatter":  # in place: updates are read, combined and written
            arrays = (len(operands) - 1) // 2
            return sum(map(self.size, operands[arrays:])) + 2 * sum(map(self.size, operands[arrays + 1 :]))
        if instruction.opcode in _ALONE:
            return instruction.size_bytes + sum(map(self.size, operands))
        return instruction.size_bytes + sum(self._reads(instruction).values())

    def _reads(self, instruction: Instruction) -> dict[str, int]:
        """name → bytes of the values in memory that a fused instruction reads."""
        found: dict[str, int] = {}
        for operand in instruction.operands:
            source = self.instructions[operand]
            if source.opcode in ("constant", "iota"):
                continue
            if source.opcode in ("parameter", "get-tuple-element", "while") or self.is_written(source):
                found[operand] = source.size_bytes
            else:
                found.update(self._reads(source))
        if instruction.opcode in _PARTS:
            return {name: min(size, instruction.size_bytes) for name, size in found.items()}
        return found

    # ---- reduce-scatter --------------------------------------------------
    def is_scattered(self, instruction: Instruction, members: int) -> bool:
        """Whether every reader of an all-reduce keeps no more than this device's part of it."""
        if instruction.is_root or len(instruction.operands) != 1:
            return False
        kept = list(self._kept_slices(instruction.name))
        limit = prod(instruction.dims) / members
        return bool(kept) and all(part is not None and prod(part.dims) <= limit for part in kept)

    def _kept_slices(self, name: str) -> Iterator[Instruction | None]:
        for reader in self.readers.get(name, ()):
            if reader.opcode in ("reshape", "bitcast", "copy", "convert", "transpose") and not reader.is_root:
                yield from self._kept_slices(reader.name)
            elif reader.opcode == "dynamic-slice" and reader.operands[0] == name and self._by_partition(reader):
                yield reader
            else:
                yield None

    def _by_partition(self, reader: Instruction) -> bool:
        """Whether the start of a slice comes from the device's own number."""
        pending, seen = list(reader.operands[1:]), set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            source = self.instructions[name]
            if source.opcode == "partition-id":
                return True
            if source.size_bytes <= 8:
                pending += source.operands
        return False
