"""How long a compiled program waits for its collectives, in the order that XLA has scheduled.

Kernels run one after the other, and collectives on a channel of their own: from where one is started to where it is
done, unless another is under way. What is left of it where it is done is waited for. Seconds are the judge's; that
kernels and collectives slow each other is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.planner.counted import put_together
from benchmarks.planner.counter import Counting
from benchmarks.planner.judge import Machine, judge
from benchmarks.planner.loops import trip_count
from benchmarks.planner.partitioned_text import Instruction, Module, read_module


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Seconds a step: of kernels, of collectives, and of these what kernels wait for."""

    compute_s: float
    communication_s: float
    waited_s: float

    @property
    def hidden(self) -> float:
        """The part of the collectives' time that kernels run beside."""
        return 1 - self.waited_s / self.communication_s if self.communication_s else 0.0


def beside(hlo_text: str, device_count: int, machine: Machine) -> Beside:
    """Of an optimized, scheduled module of `device_count` devices. Branches of conditionals are left out."""
    module = read_module(hlo_text)
    return _of(module, module.entry, device_count, machine)


def _of(module: Module, computation: str, device_count: int, machine: Machine) -> Beside:
    compute_s = communication_s = clock_s = channel_s = 0.0
    ends_s: dict[str, float] = {}  # of what is started
    for instruction in module.computations[computation].values():
        if instruction.opcode == "while":
            inside = _of(module, instruction.attribute("body"), device_count, machine)
            trips = trip_count(instruction)
            compute_s += trips * inside.compute_s
            communication_s += trips * inside.communication_s
            clock_s += trips * (inside.compute_s + inside.waited_s)
            continue
        kernels_s, moving_s = _elapsed_s(module, computation, instruction, device_count, machine)
        compute_s, communication_s, clock_s = compute_s + kernels_s, communication_s + moving_s, clock_s + kernels_s
        if moving_s:
            channel_s = max(clock_s, channel_s) + moving_s
            if instruction.opcode.endswith("-start"):
                ends_s[instruction.name] = channel_s
            else:
                clock_s = channel_s
        if instruction.opcode.endswith("-done"):
            clock_s = max(clock_s, *(ends_s.get(name, 0.0) for name in instruction.operands))
    return Beside(compute_s=compute_s, communication_s=communication_s, waited_s=clock_s - compute_s)


def _elapsed_s(
    module: Module, computation: str, instruction: Instruction, device_count: int, machine: Machine
) -> tuple[float, float]:
    """Seconds of one instruction's kernel, and of its collective."""
    counting = Counting(module, device_count)
    counting.add(instruction, module.computations[computation], 1)
    judged = judge(put_together(counting.collectives, counting.kernels), machine)
    return judged.compute_s, judged.communication_s
