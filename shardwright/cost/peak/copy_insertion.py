"""Copies of donated arguments: a result overwrites them while other readers may still need them.

After XLA's CopyInsertion (xla/service/copy_insertion.cc), which precedes scheduling: a reader precedes the writing
kernel only if that kernel depends on the reader's result. A copy is made at the start of the step; all readers read the
copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwright.cost.opcodes import IN_PLACE
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.fusion import Kernels
from shardwright.cost.peak.schedule import ScheduleStep


class Overwrite(NamedTuple):
    """A parameter, the kernels that read it, and the one that writes over it."""

    parameter: int
    readers: list[int]
    writer: int


def find_copied_arguments(
    program: DeviceProgram, kernels: Kernels, order: Sequence[ScheduleStep], donated: Mapping[int, int]
) -> list[Overwrite]:
    """The parameters XLA copies. donated: per parameter node, the node whose value overwrites it."""
    overwrites = find_overwrites(program, kernels, donated)
    others = dict.fromkeys(reader for hazard in overwrites for reader in hazard.readers if reader != hazard.writer)
    marks = {reader: 1 << bit for bit, reader in enumerate(others)}
    done = _find_dependencies(kernels, order, marks)

    def is_safe(parameter: int, reader: int, writer: int) -> bool:
        if reader == writer:
            return program.opcodes[reader] in IN_PLACE or _is_aligned(program, kernels, reader, parameter)
        return bool(done[writer] & marks[reader])

    return [
        hazard
        for hazard in overwrites
        if not all(is_safe(hazard.parameter, reader, hazard.writer) for reader in hazard.readers)
    ]


def find_overwrites(program: DeviceProgram, kernels: Kernels, donated: Mapping[int, int]) -> list[Overwrite]:
    """The parameters overwritten by results of kernels. donated: see `find_copied_arguments`."""
    readers = _readers(program, kernels, donated)
    overwrites = [
        Overwrite(parameter, nodes, _resolve_view(program, kernels, donated[parameter]))
        for parameter, nodes in readers.items()
    ]
    return [overwrite for overwrite in overwrites if program.opcodes[overwrite.writer] not in ("parameter", "constant")]


def _resolve_view(program: DeviceProgram, kernels: Kernels, node: int) -> int:
    """The kernel, or the parameter, behind a view."""
    while kernels.is_view[node] and program.operands[node]:
        node = program.operands[node][0]
    return node


def _readers(program: DeviceProgram, kernels: Kernels, parameters: Mapping[int, int]) -> dict[int, list[int]]:
    """Per parameter, the kernels that read it."""
    readers: dict[int, list[int]] = {parameter: [] for parameter in parameters}
    for node, sources in enumerate(kernels.reads):
        if kernels.is_stored[node] and not kernels.is_view[node]:
            for source in {_resolve_view(program, kernels, operand) for operand in sources} & readers.keys():
                readers[source].append(node)
    return readers


def _is_aligned(program: DeviceProgram, kernels: Kernels, reader: int, parameter: int) -> bool:
    """Whether each element of a kernel's result only needs the element of the parameter at the same place."""
    return all(
        is_aligned
        for source, is_aligned in kernels.reads[reader].items()
        if _resolve_view(program, kernels, source) == parameter
    )


def _find_dependencies(kernels: Kernels, order: Sequence[ScheduleStep], marks: Mapping[int, int]) -> dict[int, int]:
    """Per node, the marks of the readers it depends on, in bits of one number."""
    done: dict[int, int] = {}
    for step in order:
        needed = 0
        for node in step:
            for source in kernels.reads[node]:
                needed |= done[source] | marks.get(source, 0)
        done.update(dict.fromkeys(step, needed))
    return done
