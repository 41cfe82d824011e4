"""Programs in the formats of other tools, as HLO text.

Told apart by content: HLO text; serialized `HloModuleProto`, as JAX and TensorFlow give it, and `HloProto`, as XLA
dumps it; StableHLO, as text and as MLIR bytecode (https://openxla.org/stablehlo/bytecode), as `jax.export` gives it;
the container that `jax.export` puts the latter in (`Step.export`, `Exported.serialize`). All but HLO text is read by
XLA, in a child: its readers end their process on some inputs.

`python -m shardwright.xla.formats KIND` converts standard input to HLO text on standard output.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from enum import StrEnum
from os import PathLike
from pathlib import Path

from shardwright.errors import (
    DeadlineError,
    HloSyntaxError,
    OptionError,
    PlatformError,
    ShardwrightError,
    UnsupportedProgramError,
)
from shardwright.hlo.shape_text import FIXED_SIZES
from shardwright.input_files import read_input
from shardwright.processes import describe_exit
from shardwright.tuning import MOST_PROGRAM_BYTES, PROGRAM_WAIT_S
from shardwright.xla.tuning import READER_TIMEOUT_S

#: A program: HLO or StableHLO text, the bytes of any format, or the path of a file (a `str` is text).
ProgramSource = str | bytes | PathLike[str]

#: Exit codes of the child: XLA refuses the program; what is exported is no program with fixed sizes for one platform.
_REFUSED, _UNSUPPORTED = 3, 4
#: The most characters of XLA's objection that an error repeats.
_MAX_OBJECTION = 600
#: Arguments that an error lists, at most.
_MAX_LISTED = 3

_BYTECODE_MAGIC = b"ML\xefR"
_COMMENTS = r"\s*(?:(?://[^\n]*|/\*.*?\*/)\s*)*"
_HLO = re.compile(_COMMENTS + r"HloModule\b", re.DOTALL)
_MLIR = re.compile(_COMMENTS + r'(?:#\w+\s*=|"?builtin\.module\b|module\b|(?:func\.)?func\b|"func\.func")', re.DOTALL)
_SYMBOLIC = re.compile(r"dynamic|\?x|shape_assertion")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
_FORMATS = "HLO text, a serialized HloModuleProto, StableHLO text or bytecode, or a serialized jax.export.Exported"
_WRITE_ONE = (
    'write one of them: jax.jit(f).lower(...).as_text("hlo"), jax.export.export(...)(...).mlir_module_serialized, '
    "or TensorFlow's experimental_get_compiler_ir(...)(stage='hlo_serialized')"
)

#: Field numbers of XLA's protos (xla/service/hlo.proto).
_NAME, _ENTRY_NAME, _COMPUTATIONS, _PROGRAM_SHAPE = 1, 2, 3, 4
_MODULE_OF_HLO_PROTO = 1


class _Kind(StrEnum):
    """A format that XLA reads."""

    PROTO = "a serialized HloModuleProto"
    STABLEHLO = "StableHLO text"
    BYTECODE = "StableHLO bytecode"
    EXPORTED = "a serialized jax.export.Exported"


def read_program(source: ProgramSource) -> str:
    """HLO text of a program in any of the formats; HLO text itself comes back as it is.

    Raises HloSyntaxError: the program cannot be read. UnsupportedProgramError: its sizes are not fixed. PlatformError:
    flatbuffers, which reads `jax.export`'s container, is not installed. OptionError: the file cannot be read, or
    `source` is something else.
    """
    if isinstance(source, PathLike):
        return _read_file(source)
    if isinstance(source, str):
        return _text_to_hlo(source, "")
    if isinstance(source, bytes | bytearray | memoryview):
        return _bytes_to_hlo(bytes(source), "")
    raise OptionError(
        f"a program is text, bytes or a path, not {type(source).__name__}", where="hlo", remedy=_WRITE_ONE
    )


def _read_file(path: PathLike[str]) -> str:
    try:
        data = read_input(path, most_bytes=MOST_PROGRAM_BYTES, wait_s=PROGRAM_WAIT_S)
    except OSError as error:
        raise OptionError(
            f"cannot be read ({error.strerror})", where=os.fspath(path), remedy="check the path"
        ) from None
    return read_named_program(data, os.fspath(path))


def read_named_program(data: bytes, path: str) -> str:
    """`read_program` of a file's contents; `path` stands for it in errors, and in source lines of StableHLO text."""
    try:
        return _bytes_to_hlo(data, path)
    except (HloSyntaxError, UnsupportedProgramError) as error:
        where = f"{path}:{error.where}" if error.where else path
        raise type(error)(error.message, where=where, remedy=error.remedy) from None


def _text_to_hlo(text: str, path: str) -> str:
    if _HLO.match(text):
        return text
    if _MLIR.match(text):
        return _convert(_Kind.STABLEHLO, text.encode(), path)
    if text and "\n" not in text.strip() and not text[0].isspace() and " " not in text:
        raise HloSyntaxError(
            f"{text[:100]!r} is no program", remedy=f"of a file pass its path as one: pathlib.Path({text[:100]!r})"
        )
    return text  # the parser says where it stops being HLO


def _bytes_to_hlo(data: bytes, path: str) -> str:
    if data.startswith(_BYTECODE_MAGIC):
        return _convert(_Kind.BYTECODE, data, path)
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError:
        text = None
    if text is not None and (_HLO.match(text) or not _CONTROL.search(text)):
        return _text_to_hlo(text, path)
    if _BYTECODE_MAGIC in data:
        return _convert(_Kind.EXPORTED, _exported(data), path)
    return _convert(_Kind.PROTO, _module_proto(data), path)


def _exported(data: bytes) -> bytes:
    """Raises PlatformError where nothing reads the container."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise PlatformError(
            "flatbuffers is not installed, which reads what jax.export has serialized",
            remedy="pip install flatbuffers, or write exported.mlir_module_serialized",
        )
    return data


def _module_proto(data: bytes) -> bytes:
    """The serialized HloModuleProto in `data`. Raises HloSyntaxError on cut and on other data."""
    fields = _proto_fields(data)
    if fields is None:
        raise HloSyntaxError(f"this is not {_FORMATS}, or it is cut short", remedy=_WRITE_ONE)
    inner = fields.get(_MODULE_OF_HLO_PROTO)
    if _PROGRAM_SHAPE not in fields and isinstance(inner, bytes) and _is_module(_proto_fields(inner) or {}):
        return inner
    if not _is_module(fields):
        raise HloSyntaxError(
            f"a protocol buffer, but no HloModuleProto with computations; expected {_FORMATS}", remedy=_WRITE_ONE
        )
    return data


def _is_module(fields: dict[int, object]) -> bool:
    needed = (_NAME, _ENTRY_NAME, _COMPUTATIONS, _PROGRAM_SHAPE)
    return all(isinstance(fields.get(number), bytes) for number in needed)


def _proto_fields(data: bytes) -> dict[int, object] | None:
    """The last value of each field of any protocol buffer; None where the bytes are none, or are cut within a field."""
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    message = Empty()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    fields = UnknownFieldSet(message)
    return {fields[n].field_number: fields[n].data for n in range(len(fields))}


def _convert(kind: _Kind, data: bytes, path: str) -> str:
    """HLO text, from XLA in a child."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "shardwright.xla.formats", kind.name],
            input=data,
            capture_output=True,
            timeout=READER_TIMEOUT_S,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"XLA did not read {kind} within {READER_TIMEOUT_S:.0f} s",
            remedy="check that the file is whole; pass HLO text",
        ) from None
    if child.returncode == _REFUSED:
        objection = child.stdout.decode(errors="replace").strip()
        first = objection.partition("\n")[0].removeprefix("UNKNOWN: ")[:_MAX_OBJECTION]
        reader = "JAX" if kind is _Kind.EXPORTED else "XLA"
        if _SYMBOLIC.search(objection):
            raise UnsupportedProgramError(f"the sizes of {kind} are not fixed: {first}", remedy=FIXED_SIZES)
        raise HloSyntaxError(
            f"{reader} cannot read {kind}: {first}",
            remedy="check that it is whole, and no newer than the installed jaxlib",
        )
    if child.returncode == _UNSUPPORTED:
        message, remedy = child.stdout.decode(errors="replace").strip().split("\n", 1)
        raise UnsupportedProgramError(message, remedy=remedy)
    if child.returncode != 0:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = describe_exit(child.returncode)
        raise HloSyntaxError(
            f"XLA's reader ends its process ({how}) on this {kind.removeprefix('a ')}: {''.join(last)[:200]}",
            remedy="it is damaged, or newer than the installed jaxlib: write it again",
        )
    text = child.stdout.decode()
    name = Path(path).name if path else "stablehlo"
    return text.replace('source_file="-"', f'source_file="{name}"') if kind is _Kind.STABLEHLO else text


def _stablehlo_of_exported(data: bytes) -> bytes:
    """StableHLO bytecode in `jax.export`'s container. Raises HloSyntaxError: it is none, or damaged.
    UnsupportedProgramError: its sizes, or its platform, are not fixed.
    """
    import jax
    from jax import export

    try:
        exported = export.deserialize(bytearray(data))
        leaves, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(exported.in_tree, exported.in_avals))
        module = exported.mlir_module_serialized
    except Exception as error:  # of any kind: flatbuffers reads offsets that may point anywhere
        raise HloSyntaxError(f"{type(error).__name__}: {error}") from None
    symbolic = [
        f"argument {jax.tree_util.keystr(path[1:])} has the shape ({', '.join(map(str, aval.shape))})"
        for path, aval in leaves
        if not all(isinstance(size, int) for size in aval.shape)
    ]
    if symbolic:
        more = f" and {len(symbolic) - _MAX_LISTED} more" if len(symbolic) > _MAX_LISTED else ""
        raise UnsupportedProgramError(
            f"it is exported for symbolic sizes: {', '.join(symbolic[:_MAX_LISTED])}{more}", remedy=FIXED_SIZES
        )
    if len(exported.platforms) > 1:
        raise UnsupportedProgramError(
            f"it is exported for {', '.join(exported.platforms)} at once: the platform is an argument of its program",
            remedy='export it for one: jax.export.export(f, platforms=["cpu"])',
        )
    return bytes(module)


def _to_hlo(kind: _Kind, data: bytes) -> str:
    from shardwright.xla.private import hlo_of_proto, hlo_of_stablehlo

    if kind is _Kind.PROTO:
        return hlo_of_proto(data)
    return hlo_of_stablehlo(_stablehlo_of_exported(data) if kind is _Kind.EXPORTED else data)


def main() -> int:
    data = sys.stdin.buffer.read()
    try:
        text = _to_hlo(_Kind[sys.argv[1]], data)
    except UnsupportedProgramError as error:
        print(f"{error.message}\n{error.remedy}")
        return _UNSUPPORTED
    except ShardwrightError as error:
        print(error.message)
        return _REFUSED
    sys.stdout.buffer.write(text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
