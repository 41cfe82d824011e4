"""Where in the user's program an instruction comes from.

Newer printers put source lines into four tables ahead of the computations, and
`stack_frame_id` into each instruction's metadata; older ones put
`source_file` and `source_line` there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from shardwright.hlo.ir import Instruction, Module, SourceLocation
from shardwright.hlo.strings import unescape

#: Files that are not the user's: in folders of installed packages, Python's own library, code that no file holds (but
#: what is typed at a prompt), and the insides of frameworks that lie elsewhere (vendored, or built from source).
_LIBRARY = re.compile(
    r"(?:^|/)(?:site|dist)-packages/"
    r"|(?:^|/)lib(?:64)?/(?:python|pypy)\d|/Python\d*/lib/(?!site-packages)"
    r"|^<(?!stdin>|ipython-input|cell)"
    r"|(?:^|/)(?:jax/_src|tensorflow/(?:python|compiler|core)|torch/(?:_\w+|autograd|nn|optim|utils)|torch_xla)/"
    r"|(?:^|/)(?:flax/(?:core|linen|nnx)|(?:haiku|optax|keras)/_?src|equinox/_?\w+)/",
    re.IGNORECASE,
)

#: The tables, in the order in which they stand between a module's header and its computations.
TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

_FIELDS_OF_LOCATION = frozenset(["file_name_id", "function_name_id", "line", "end_line", "column", "end_column"])
_FIELDS_OF_FRAME = frozenset(["file_location_id", "parent_frame_id"])
_ENTRY = re.compile(r"\{\s*[a-z_]+=-?[0-9]{1,10}(?:[\s,]+[a-z_]+=-?[0-9]{1,10})*+\s*\}", re.ASCII)
_FIELD = re.compile(r"([a-z_]+)=(-?[0-9]{1,18})", re.ASCII)


def find_table_problem(tables: Mapping[str, Sequence[str]]) -> str | None:
    """What is wrong with a module's tables, or None: entries of another form, numbers of entries that do not exist."""
    if not tables:
        return None
    for table in ("FileNames", "FunctionNames"):
        if any(entry[0] != '"' for entry in tables[table]):
            return f"expected strings in {table}"
    for table, names in (("FileLocations", _FIELDS_OF_LOCATION), ("StackFrames", _FIELDS_OF_FRAME)):
        for number, entry in enumerate(tables[table], start=1):
            if not _ENTRY.fullmatch(entry) or _fields(entry).keys() != names:
                return f"entry {number} of {table} needs {', '.join(sorted(names))}"
    for entry in tables["FileLocations"]:
        fields = _fields(entry)
        names_exist = fields["function_name_id"] <= len(tables["FunctionNames"])
        if not names_exist or not 0 < fields["file_name_id"] <= len(tables["FileNames"]):
            return f"no such file or function: {entry}"
    for entry in tables["StackFrames"]:
        if not 0 < _fields(entry)["file_location_id"] <= len(tables["FileLocations"]):
            return f"no such file location: {entry}"
    return None


class _Frame(NamedTuple):
    location_id: int
    parent_id: int


def locate(module: Module, instruction: Instruction) -> SourceLocation | None:
    """The innermost line of the instruction's stack that is not in an installed library.

    Where every frame is a library's, `op_name` says more: then None, and the innermost frame only where there is none.
    """
    frames = stack(module, instruction)
    own = next((frame for frame in frames if not is_library(frame.file)), None)
    if own is not None or not frames:
        return own
    return None if instruction.op_name else frames[0]


def is_library(file: str) -> bool:
    """Whether a file is a framework's or Python's own, rather than the user's."""
    return _LIBRARY.search(file.replace("\\", "/")) is not None


def place(module: Module, instruction: Instruction) -> str:
    """Where an instruction comes from, in short: `model.py:93`; else its `op_name`; else nothing."""
    line = locate(module, instruction)
    return f"{PurePosixPath(line.file.replace(chr(92), '/')).name}:{line.line}" if line else instruction.op_name


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
        fields.get("column", -1),
    )


def _string(module: Module, table: str, number: int) -> str:
    entries = module.tables.get(table, ())
    return unescape(entries[number - 1]) if 0 < number <= len(entries) else ""
