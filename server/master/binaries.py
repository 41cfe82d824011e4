"""Compiled programs in the store's form: valid for one version of JAX on one machine."""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwright.errors import StateStoreError
from shardwright.server.master import events as ev
from shardwright.server.master.content_store import PlanRecord
from shardwright.server.master.executables import NodesOf, Payload, compile_program
from shardwright.server.master.store import BinaryRow
from shardwright.server.versions import jax_version
from shardwright.xla.compiled import CompiledMemory, CompiledProgram, ObservedCollective


def to_rows(program: ev.ProgramInfo) -> list[BinaryRow]:
    """Of each of its compiled programs, in order; blocking: they are compressed."""
    payload: Payload = program.payload
    return [_to_row(program.plan_id, number, item.compiled) for number, item in enumerate(payload.binaries.values())]


def _to_row(plan_id: str, number: int, compiled: CompiledProgram) -> BinaryRow:
    header = {
        "made_by": _maker(),
        "collectives": [asdict(collective) for collective in compiled.collectives],
        "memory": None if compiled.memory is None else asdict(compiled.memory),
        "emit_s": compiled.emit_s,
        "compile_s": compiled.compile_s,
    }
    return BinaryRow(
        plan_id=plan_id,
        number=number,
        header=json.dumps(header),
        stablehlo=zlib.compress(compiled.stablehlo.encode(), 1),
        partitioned_gzip=compiled.partitioned_gzip,
        serialized=compiled.serialized,
    )


def to_program(plan_id: str, record: PlanRecord, rows: Sequence[BinaryRow], nodes_of: NodesOf) -> ev.ProgramInfo:
    """Blocking. Raises StateStoreError on programs of another JAX, another machine, or that cannot be read."""
    try:
        compiled = [_from_row(row) for row in sorted(rows, key=lambda row: row.number)]
        return compile_program(plan_id, record, _Compiled(compiled), nodes_of)  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError, zlib.error) as error:
        raise StateStoreError(f"a compiled program cannot be read: {error}", remedy="it is compiled again") from None


def _from_row(row: BinaryRow) -> CompiledProgram:
    header = json.loads(row.header)
    if header["made_by"] != _maker():
        raise ValueError(f"it was made by {header['made_by']}")
    memory = header["memory"]
    return CompiledProgram(
        stablehlo=zlib.decompress(row.stablehlo).decode(),
        partitioned_gzip=row.partitioned_gzip,
        serialized=row.serialized,
        collectives=tuple(ObservedCollective(**fields) for fields in header["collectives"]),
        memory=None if memory is None else CompiledMemory(**memory),
        emit_s=header["emit_s"],
        compile_s=header["compile_s"],
    )


def _maker() -> str:
    return f"jax {jax_version()} on {platform.node()} ({platform.machine()})"


class _Compiled:
    """In the place of a `CompileService`: what it would give was compiled before."""

    platform = ""

    def __init__(self, programs: Sequence[CompiledProgram]) -> None:
        self._programs = programs

    def compile(self, *program: Any, **options: Any) -> CompiledProgram:
        del program, options
        (compiled,) = self._programs
        return compiled

    def compile_all(self, jobs: Sequence[Any], cancellation: Any = None) -> Sequence[CompiledProgram]:
        del cancellation
        if len(jobs) != len(self._programs):
            raise ValueError(f"{len(self._programs)} programs of {len(jobs)}")
        return self._programs
