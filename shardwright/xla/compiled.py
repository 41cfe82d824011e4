"""Results of compiling a planned program."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import CompilationError
from shardwright.plans.plan import OptionValue


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCollective:
    """A collective that XLA put into a partitioned program.

    kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute; an all-reduce with only a slice kept
    on every device counts as a reduce-scatter, its form on GPU and TPU.
    payload_bytes: bytes on one device of the larger of operand and result (all arrays of a
        combined collective together): the whole array of an all-reduce, all-gather or
        reduce-scatter, one shard of an all-to-all or permute.
    wire_bytes: bytes one device puts on the wire, once (ring algorithm).
    group_size / group_count: devices that work together, and how many such groups
        (a permute has one group of the devices that send to another or receive).
    count: executions a step, trip counts of loops multiplied in.
    trip_counts_known: False if a loop's trip count is not in the program (it counts once).
    groups: as XLA printed them.
    instruction: name in the partitioned HLO.
    op_name: the planned HLO instruction behind it, if XLA kept its name.
    """

    kind: str
    payload_bytes: int
    wire_bytes: int
    group_size: int
    group_count: int
    count: int
    trip_counts_known: bool
    groups: str
    instruction: str
    op_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledMemory:
    """XLA's own figures for one device, in bytes. `alias_bytes` are outputs that reuse arguments."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """A planned program after XLA's compilation.

    stablehlo: the emitted module, in text.
    partitioned_gzip: the HLO text of each device, from before XLA:CPU combines collectives; gzip-compressed.
    serialized: XLA's executable, or None if it was not requested or cannot be serialized.
    collectives: inserted by XLA, in program order.
    memory: None if only the partitioner ran.
    """

    stablehlo: str
    partitioned_gzip: bytes
    serialized: bytes | None
    collectives: tuple[ObservedCollective, ...]
    memory: CompiledMemory | None
    emit_s: float
    compile_s: float

    @property
    def partitioned(self) -> str:
        return gzip.decompress(self.partitioned_gzip).decode()


def refusal(error: Exception, options: Mapping[str, OptionValue]) -> CompilationError:
    """XLA's error against a program or one of its compile options."""
    said = beginning_of(error)
    name = next((name for name in options if f"'{name}'" in said or f"option {name}," in said), None)
    if name is None:
        return CompilationError(f"XLA refused the program: {said}")
    return CompilationError(
        f"XLA does not take the option {name} = {options[name]!r}: {said}",
        where="compile_options",
        remedy="correct compiler.hiding_option of the hardware profile, or set links.overlap to 0 in the cluster file",
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether XLA found no memory on a device."""
    return "RESOURCE_EXHAUSTED" in str(error)


def remedy_of(error: Exception) -> str:
    """What to do about an error of XLA in a step; empty where only its message can say."""
    if not is_out_of_memory(error):
        return ""
    return "drop arrays that nobody needs, make the batch smaller, or plan with a smaller memory_budget or more stages"


def beginning_of(error: Exception, limit: int = 2000) -> str:
    """XLA's message, cut before stack dumps and module text: `limit` characters."""
    message = str(error).strip()
    return message if len(message) <= limit else f"{message[:limit]} … ({len(message)} characters)"
