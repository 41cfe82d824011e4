"""The process that compiles: reads requests on stdin, answers on stdout, may die of any of them.

Started by `CompileService`, with the device count in its environment and its folder of temporary files in its argument;
behind it, where it compiles for devices that are not here, which and by what (`CompilerInFolder`).
Ends with stdin: it never outlives its parent and leaves no file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import shutil
import sys
import threading
from typing import Any, BinaryIO

from shardwright.errors import InternalError, ShardwrightError
from shardwright.log_lines import about, log_to_parent
from shardwright.plans.plan_json import decode
from shardwright.xla.compiled import CompiledProgram
from shardwright.xla.compilers import CompilerInFolder
from shardwright.xla.messages import Header, read_message, write_message
from shardwright.xla.private import compile_for_described, open_cpu_client

_log = logging.getLogger("shardwright.xla")

Request = tuple[Header, list[bytes]]


def main() -> None:
    """Serve requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever XLA prints goes to stderr, not between the answers
    log_to_parent("compiler")
    if len(sys.argv) > 2:
        wanted = CompilerInFolder(**json.loads(sys.argv[2]))
        compile_for_described(wanted.compiler.describe_devices(wanted.folder, wanted.device_count))
    elif os.environ.get("JAX_PLATFORMS") == "cpu":
        open_cpu_client()
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    write_message(answers, {"ready": True})
    while True:
        header, blobs = requests.get()
        with about(**header["about"]):
            _answer(answers, header, blobs)


def _read_requests(requests: queue.SimpleQueue[Request]) -> None:
    """Hand on requests; end the process at the end of stdin, even while XLA compiles."""
    while (message := read_message(sys.stdin.buffer.read)) is not None:
        requests.put(message)
    shutil.rmtree(sys.argv[1], ignore_errors=True)  # whoever would remove it may have been killed
    os._exit(0)


def _answer(answers: BinaryIO, header: Header, blobs: list[bytes]) -> None:
    try:
        reply, payload = _JOBS[header["job"]](header, blobs)
    except ShardwrightError as error:
        reply, payload = _error(error), []
    except Exception as error:
        _log.exception("the job %r failed: %s: %s", header["job"], type(error).__name__, error)
        reply, payload = _error(InternalError(f"the compile child failed: {type(error).__name__}: {error}")), []
    write_message(answers, reply, payload)
    if header.get("inspect") == "partition-pass":
        from shardwright.xla.compiling import wait_for_xla

        wait_for_xla()  # what ends XLA from here on is no fault of the next program's
        write_message(answers, {"ready": True})


def _error(error: ShardwrightError) -> Header:
    return {"code": error.code, "message": error.message, "where": error.where, "remedy": error.remedy}


def _compile(header: Header, blobs: list[bytes]) -> tuple[Header, list[bytes]]:
    from shardwright.xla.compiling import compile_planned, inspect_partitioned

    hlo_text = blobs[0].decode()
    plan = decode(blobs[1].decode(), hlo_text)  # refuses a plan of another program
    if header["inspect"] == "partition-pass":
        program = inspect_partitioned(hlo_text, plan)
    else:
        program = compile_planned(hlo_text, plan, want_executable=header["want_executable"])
    return _reply(program)


def _compile_emitted(header: Header, blobs: list[bytes]) -> tuple[Header, list[bytes]]:
    from shardwright.xla.compiling import compile_emitted

    stablehlo, plan = blobs[0].decode(), decode(blobs[1].decode())
    return _reply(compile_emitted(stablehlo, plan, want_executable=header["want_executable"]))


def _reply(program: CompiledProgram) -> tuple[Header, list[bytes]]:
    reply: dict[str, Any] = {
        "collectives": [dataclasses.asdict(collective) for collective in program.collectives],
        "memory": None if program.memory is None else dataclasses.asdict(program.memory),
        "emit_s": program.emit_s,
        "compile_s": program.compile_s,
    }
    parts = [program.stablehlo.encode(), program.partitioned_gzip]
    if program.serialized is not None:
        parts.append(program.serialized)
    return reply, parts


def _compile_stablehlo(header: Header, blobs: list[bytes]) -> tuple[Header, list[bytes]]:
    from shardwright.xla.compiling import compile_stablehlo, partition_hlo
    from shardwright.xla.private import hlo_of_executable

    stablehlo, device_count = blobs[0].decode(), header["device_count"]
    if header["inspect"] == "partition-pass":
        return {}, [partition_hlo(stablehlo, device_count).encode()]
    return {}, [hlo_of_executable(compile_stablehlo(stablehlo, device_count)).encode()]


def _emit(header: Header, blobs: list[bytes]) -> tuple[Header, list[bytes]]:
    from shardwright.xla.compiling import emit_for_this_process

    hlo_text = blobs[0].decode()
    plan = decode(blobs[1].decode(), hlo_text)
    return {}, [emit_for_this_process(hlo_text, plan).encode()]


_JOBS = {
    "compile": _compile,
    "compile_emitted": _compile_emitted,
    "compile_stablehlo": _compile_stablehlo,
    "emit": _emit,
}

if __name__ == "__main__":
    main()
