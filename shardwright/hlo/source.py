"""Where in the user's program an instruction comes from.

Newer printers put source lines into four tables ahead of the computations, and
`stack_frame_id` into each instruction's metadata; older ones put
`source_file` and `source_line` there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shardwright.hlo.ir import Instruction, Module, SourceLocation
from shardwright.hlo.strings import unescape

#: Parts of paths where libraries are installed: their frames are not the user's.
LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/", "/lib/python3")

_FIELD = re.compile(r"([a-z_]+)=(-?[0-9]{1,18})", re.ASCII)


class _Frame(NamedTuple):
    location_id: int
    parent_id: int


def locate(module: Module, instruction: Instruction) -> SourceLocation | None:
    """The innermost line of the instruction's stack that is not in an installed library.

    Where every frame is a library's, the innermost of all; None where the text says nothing.
    """
    frames = stack(module, instruction)
    own = (frame for frame in frames if not any(folder in frame.file for folder in LIBRARY_FOLDERS))
    return next(own, frames[0] if frames else None)


def stack(module: Module, instruction: Instruction) -> tuple[SourceLocation, ...]:
    """Every known frame of the Python stack that made the instruction, innermost first."""
    metadata = instruction.get("metadata") or {}
    frame_id = metadata.get("stack_frame_id")
    if type(frame_id) is int and module.tables:
        frames = _frames(module)
        result: list[SourceLocation] = []
        # A table that chains in a circle ends after as many frames as it has.
        while 0 < frame_id <= len(frames) and len(result) < len(frames):
            frame = frames[frame_id - 1]
            location = _location(module, frame.location_id)
            if location is not None:
                result.append(location)
            if frame.parent_id == frame_id:
                break
            frame_id = frame.parent_id
        if result:
            return tuple(result)
    file, line = metadata.get("source_file"), metadata.get("source_line")
    return (SourceLocation(file, line, ""),) if isinstance(file, str) and type(line) is int else ()


def _fields(entry: str) -> dict[str, int]:
    return {name: int(number) for name, number in _FIELD.findall(entry)}


def _frames(module: Module) -> list[_Frame]:
    """The stack frames. XLA prints a parent's number one too high, so that 1 says "no parent"."""
    entries = [_fields(entry) for entry in module.tables.get("StackFrames", ())]
    shift = 0 if any(entry.get("parent_frame_id", 1) == 0 for entry in entries) else 1
    return [_Frame(entry.get("file_location_id", 0), entry.get("parent_frame_id", 1) - shift) for entry in entries]


def _location(module: Module, location_id: int) -> SourceLocation | None:
    locations = module.tables.get("FileLocations", ())
    if not 0 < location_id <= len(locations):
        return None
    fields = _fields(locations[location_id - 1])
    return SourceLocation(
        _string(module, "FileNames", fields.get("file_name_id", 0)),
        fields.get("line", 0),
        _string(module, "FunctionNames", fields.get("function_name_id", 0)),
    )


def _string(module: Module, table: str, number: int) -> str:
    entries = module.tables.get(table, ())
    return unescape(entries[number - 1]) if 0 < number <= len(entries) else ""
