"""Overlap of a compiled program's collectives with its kernels, in XLA's schedule.

Kernels run one after the other. Collectives run one after the other on a channel of their own, each from its start
instruction on. The rest of a collective at its done instruction is exposed: kernels wait for it. Seconds are the
judge's; kernels and collectives do not slow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.planner.counted import build_counts
from benchmarks.planner.counter import ProgramCounter
from benchmarks.planner.judge import Machine, judge
from benchmarks.planner.loops import trip_count
from benchmarks.planner.partitioned_text import Instruction, Module, read_module


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds a step: of kernels, of collectives, and of the kernels' waits for collectives."""

    compute_s: float
    communication_s: float
    exposed_s: float

    @property
    def hidden_fraction(self) -> float:
        """The part of the collectives' seconds beside running kernels: 1 - exposed / communication."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s else 0.0


def measure_overlap(hlo_text: str, device_count: int, machine: Machine) -> Overlap:
    """Simulate an optimized, scheduled module of `device_count` devices, without branches of conditionals."""
    module = read_module(hlo_text)
    return _simulate(module, module.entry, device_count, machine)


def _simulate(module: Module, computation: str, device_count: int, machine: Machine) -> Overlap:
    compute_s = communication_s = clock_s = channel_s = 0.0
    ends_s: dict[str, float] = {}  # of started collectives
    for instruction in module.computations[computation].values():
        if instruction.opcode == "while":
            body = _simulate(module, instruction.attribute("body"), device_count, machine)
            trips = trip_count(instruction)
            compute_s += trips * body.compute_s
            communication_s += trips * body.communication_s
            clock_s += trips * (body.compute_s + body.exposed_s)
            continue
        kernels_s, collective_s = _judge_instruction(module, computation, instruction, device_count, machine)
        compute_s, communication_s, clock_s = compute_s + kernels_s, communication_s + collective_s, clock_s + kernels_s
        if collective_s:
            channel_s = max(clock_s, channel_s) + collective_s
            if instruction.opcode.endswith("-start"):
                ends_s[instruction.name] = channel_s
            else:
                clock_s = channel_s
        if instruction.opcode.endswith("-done"):
            clock_s = max(clock_s, *(ends_s.get(name, 0.0) for name in instruction.operands))
    return Overlap(compute_s=compute_s, communication_s=communication_s, exposed_s=clock_s - compute_s)


def _judge_instruction(
    module: Module, computation: str, instruction: Instruction, device_count: int, machine: Machine
) -> tuple[float, float]:
    """Seconds of one instruction's kernel, and of its collective."""
    counter = ProgramCounter(module, device_count)
    counter.add(instruction, module.computations[computation], 1)
    step_time = judge(build_counts(counter.collectives, counter.kernels), machine)
    return step_time.compute_s, step_time.communication_s
