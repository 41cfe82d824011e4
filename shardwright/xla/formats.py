"""Programs in the formats of other tools, as HLO text.

Told apart by content: HLO text; serialized `HloModuleProto`, as JAX and TensorFlow give it, and `HloProto`, as XLA
dumps it; StableHLO, as text and as MLIR bytecode (https://openxla.org/stablehlo/bytecode), as `jax.export` gives it.
All but HLO text is read by XLA, in a child: its readers end their process on some inputs.

`python -m shardwright.xla.formats KIND` converts standard input to HLO text on standard output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from enum import StrEnum
from os import PathLike
from pathlib import Path

from shardwright.errors import DeadlineError, HloSyntaxError, OptionError, ShardwrightError
from shardwright.processes import describe_exit

#: A program: HLO or StableHLO text, the bytes of any format, or the path of a file (a `str` is text).
ProgramSource = str | bytes | PathLike[str]

#: Longest wait for XLA's reader; a program of 50,000 instructions takes seconds.
_TIMEOUT_S = 600.0
#: Exit code of the child where XLA refuses the program.
_REFUSED = 3
#: The most characters of XLA's objection that an error repeats.
_MAX_OBJECTION = 600

_BYTECODE_MAGIC = b"ML\xefR"
_COMMENTS = r"\s*(?:(?://[^\n]*|/\*.*?\*/)\s*)*"
_HLO = re.compile(_COMMENTS + r"HloModule\b", re.DOTALL)
_MLIR = re.compile(_COMMENTS + r'(?:#\w+\s*=|"?builtin\.module\b|module\b|(?:func\.)?func\b|"func\.func")', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
_FORMATS = "HLO text, a serialized HloModuleProto, StableHLO text, or StableHLO bytecode"
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


def read_program(source: ProgramSource) -> str:
    """HLO text of a program in any of the formats; HLO text itself comes back as it is.

    Raises HloSyntaxError: the program cannot be read. OptionError: the file cannot, or `source` is something else.
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
        data = Path(path).read_bytes()
    except OSError as error:
        raise OptionError(
            f"cannot be read ({error.strerror})", where=os.fspath(path), remedy="check the path"
        ) from None
    return read_named_program(data, os.fspath(path))


def read_named_program(data: bytes, path: str) -> str:
    """`read_program` of a file's contents; `path` stands for it in errors, and in source lines of StableHLO text."""
    try:
        return _bytes_to_hlo(data, path)
    except HloSyntaxError as error:
        where = f"{path}:{error.where}" if error.where else path
        raise HloSyntaxError(error.message, where=where, remedy=error.remedy) from None


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
        raise HloSyntaxError(
            "StableHLO bytecode lies inside the file, behind something else",
            remedy="of a jax.export.Exported write exported.mlir_module_serialized, not exported.serialize()",
        )
    return _convert(_Kind.PROTO, _module_proto(data), path)


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
            timeout=_TIMEOUT_S,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"XLA did not read {kind} within {_TIMEOUT_S:.0f} s", remedy="check that the file is whole; pass HLO text"
        ) from None
    if child.returncode == _REFUSED:
        objection = child.stdout.decode(errors="replace").strip()
        first = objection.partition("\n")[0].removeprefix("UNKNOWN: ")[:_MAX_OBJECTION]
        raise HloSyntaxError(f"XLA cannot read {kind}: {first}", remedy=_remedy_of(objection))
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


def _remedy_of(objection: str) -> str:
    if "dynamic" in objection or "?x" in objection or "shape_assertion" in objection:
        return "export it with fixed shapes: a plan is for arrays of known sizes"
    return "check that it is whole, and no newer than the installed jaxlib"


def main() -> int:
    from shardwright.xla.private import hlo_of_proto, hlo_of_stablehlo

    data = sys.stdin.buffer.read()
    try:
        text = hlo_of_proto(data) if _Kind[sys.argv[1]] is _Kind.PROTO else hlo_of_stablehlo(data)
    except ShardwrightError as error:
        print(error.message)
        return _REFUSED
    sys.stdout.buffer.write(text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
