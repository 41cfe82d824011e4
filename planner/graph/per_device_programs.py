"""Refuses per-device programs: the output of XLA's partitioner, or one replica's program.

Their arrays are one device's shards and their collectives name fixed devices; planned like a whole program they would
compute something else. Evidence of such a text (a mesh of its own and shardings on its instructions are none):

- an instruction about devices: a collective, `partition-id`, `replica-id`, a transfer between devices; those in manual
  regions (`manual_regions`) are none;
- `replica_count` above one: the text is one replica's;
- computations named by the partitioner (`main.4_spmd`);
- `num_partitions` above one in text after optimization (a schedule, fusions): it comes after partitioning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import Computation, Instruction, Module
from shardwright.hlo.opcodes import COLLECTIVES, DEVICE_NUMBERS
from shardwright.planner.graph.manual_regions import computations_inside, find_regions

_TRANSFERS = frozenset({"send", "recv"})
#: The partitioner writes `_spmd` behind a name and its number (`main.4_spmd`); a user's `f_spmd` has the number last.
_PARTITIONED = re.compile(r"\.[0-9]+_spmd(?![A-Za-z0-9_])", re.ASCII)
_NAMED_SPMD = re.compile(r"_spmd(?:\.[0-9]+)?$", re.ASCII)
_ASYNC = re.compile(r"-(?:start|update|done)$", re.ASCII)
#: The remedy for text dumped too late: which text to give instead.
REMEDY = (
    'give the text before partitioning and optimization: jax.jit(f).lower(...).as_text("hlo"), `shardwright lower`, or '
    "the module *before_optimizations.txt of --xla_dump_to; of a step for pmap, one of the whole batch for jax.jit"
)


def refuse_per_device_program(module: Module) -> None:
    """Raises UnsupportedProgramError on a per-device program; the message names the instruction and the right text."""
    evidence = next(_evidence(module), None)
    if evidence is not None:
        what, where = evidence
        raise UnsupportedProgramError(f"the text is the program of one device: {what}", where=where, remedy=REMEDY)


def is_single_device(instruction: Instruction, module: Module) -> bool:
    """Whether a collective has one device only, in a program without others: it forwards its operand."""
    if instruction.opcode not in COLLECTIVES or _count(module, "num_partitions") * _count(module, "replica_count") > 1:
        return False
    groups = instruction.get("replica_groups") or instruction.get("source_target_pairs") or ()
    return bool(groups) and all(set(group) == {0} for group in groups)


def is_optimized(module: Module) -> bool:
    """Whether a text was dumped after optimization: XLA's compilers schedule and fuse at the end."""
    scheduled = module.header.get("is_scheduled")
    if scheduled is not None and scheduled.value:
        return True
    return any(instruction.opcode == "fusion" for instruction in module.instructions())


def _evidence(module: Module) -> Iterator[tuple[str, str]]:
    inside = computations_inside(find_regions(module))  # of manual regions: these are read as what they are
    for instruction in (i for c in module.computations if c not in inside for i in c.instructions):
        what = _device_use(instruction)
        if what is not None and not is_single_device(instruction, module):
            yield f"{instruction.name!r} is {what}", location_of(module, instruction)
    partitions, replicas = _count(module, "num_partitions"), _count(module, "replica_count")
    if replicas > 1:
        yield f"its header says replica_count={replicas}", module.name
    for computation in module.computations:
        if _is_partitioned(computation, partitions):
            yield f"the partitioner named {computation.name!r}", location_of(module, computation.instructions[0])
    if partitions > 1 and is_optimized(module):
        yield f"num_partitions={partitions}, and XLA optimizes after it has partitioned", module.name


def _is_partitioned(computation: Computation, partitions: int) -> bool:
    """Whether the partitioner named a computation."""
    name = computation.name
    if computation.is_entry and (name.endswith("_spmd") or (partitions > 1 and _NAMED_SPMD.search(name))):
        return True
    return (computation.is_entry or partitions > 1) and _PARTITIONED.search(name) is not None


def _device_use(instruction: Instruction) -> str | None:
    """An instruction's relation to other devices; None without any."""
    opcode = _ASYNC.sub("", instruction.opcode)
    if opcode in COLLECTIVES:
        size = max((len(group) for group in instruction.get("replica_groups") or ()), default=0)
        over = f"over {size} devices" if size > 1 else "between devices"
        return f"{'an' if opcode.startswith('a') else 'a'} {instruction.opcode} {over}"
    if opcode in DEVICE_NUMBERS:
        return f"the number of the device ({opcode})"
    if opcode in _TRANSFERS and not instruction.get("is_host_transfer", False):
        return f"a {instruction.opcode} between devices"
    return None


def location_of(module: Module, instruction: Instruction) -> str:
    """An instruction's line in the text, and in the user's program when known."""
    source = module.source(instruction)
    return f"line {instruction.line}" + (f", {source}" if source is not None else "")


def _count(module: Module, name: str) -> int:
    attribute = module.header.get(name)
    return 1 if attribute is None else int(attribute.value)
