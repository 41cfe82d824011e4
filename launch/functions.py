"""A Python function as ranks of this machine: `run(train, np=4)` returns each rank's result."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.errors import LaunchError, ObjectTypeError, OptionError
from shardwright.launch.hosts import Host, place_ranks
from shardwright.launch.job import rank_job
from shardwright.launch.launcher import RunOptions, failure_of, run_job
from shardwright.launch.meeting import MeetingPoint
from shardwright.launch.output import Sink
from shardwright.launch.service import LOOPBACK, CoordinationService
from shardwright.launch.tuning import DEFAULT_GRACE_S
from shardwright.package import FOLDER

#: Files of one call, in a folder of its own.
CALL_FILE = "call"
RESULT_FILE = "result.{rank}"

#: The folder of this package.
_PACKAGES = str(FOLDER.parent)

_REMEDY = "give a function that a module defines at its top level"


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int = 1,
    env: Mapping[str, str] | None = None,
    grace_s: float = DEFAULT_GRACE_S,
) -> list[Any]:
    """Run `function(*args, **kwargs)` in `np` processes of this machine; returns the results in rank order.

    function: importable in each process by module and name; in a script guard the call itself by
    `if __name__ == "__main__":`. Arguments and results: numbers, texts, bytes, None, numpy arrays, and lists, tuples,
    sets and dicts of them. env: variables of all ranks. Their output is printed here, with the rank.

    Raises OptionError for values of other types, LaunchError with the first failing rank's traceback. No process
    outlives the call.
    """
    if type(np) is not int or np < 1:
        raise OptionError(f"np={np!r}", where="np", remedy="a whole number from 1")
    call = {
        "function": find_function(function),
        "args": list(args),
        "kwargs": dict(kwargs or {}),
        "path": list(sys.path),
    }
    message = _message(call)
    name = getattr(function, "__qualname__", "function")
    with tempfile.TemporaryDirectory(prefix="shardwright-run-") as folder:
        Path(folder, CALL_FILE).write_bytes(message)
        _run_ranks(folder, name, np, env or {}, grace_s)
        return [_read_result(folder, name, rank) for rank in range(np)]


def _message(call: Mapping[str, Any]) -> bytes:
    from shardwright.object_codec import dumps  # and with it numpy, which the launcher itself does without

    try:
        return dumps(call, "run")
    except ObjectTypeError as error:
        raise OptionError(error.message, where=error.where, remedy=error.remedy) from None


def _read(record: Path) -> dict[str, Any]:
    from shardwright.object_codec import loads

    content: dict[str, Any] = loads(record.read_bytes())
    return content


def _run_ranks(folder: str, name: str, size: int, environment: Mapping[str, str], grace_s: float) -> None:
    placements = place_ranks((Host(name="localhost", slots=size),), size)
    program = f"import sys; sys.path.insert(0, {_PACKAGES!r}); from shardwright.launch import function_child as child"
    command = (sys.executable, "-c", f"{program}; sys.exit(child.main({folder!r}))")
    with CoordinationService(LOOPBACK, size) as service, MeetingPoint(LOOPBACK, size, first=service) as meeting:
        job = rank_job(
            placements, command, coordinator=service.address, meeting=meeting.address, environment=environment
        )
        outcome = run_job(
            job,
            RunOptions(
                sinks={"stdout": _make_text_sink("stdout"), "stderr": _make_text_sink("stderr")},
                grace_s=grace_s,
                take_signals=False,
            ),
        )
    failure = failure_of(job, outcome)
    if failure is None:
        return
    rank = getattr(outcome.failure, "number", None)
    record = Path(folder, RESULT_FILE.format(rank=rank))
    if record.exists():
        trace = _read(record)["traceback"]
        raise LaunchError(f"rank {rank} raised\n{trace.rstrip()}", where=name)
    raise LaunchError(failure.message, where=name, remedy=failure.remedy or "its last lines are above")


def _read_result(folder: str, name: str, rank: int) -> Any:
    record = Path(folder, RESULT_FILE.format(rank=rank))
    if not record.exists():
        raise LaunchError(f"rank {rank} ended without returning", where=name, remedy="leave out os._exit")
    return _read(record)["value"]


def _make_text_sink(stream: str) -> Sink:
    """A sink to the current `sys.stdout` or `sys.stderr`, also a redirected one."""

    def write(data: bytes) -> None:
        target = getattr(sys, stream)
        target.write(data.decode(errors="replace"))
        target.flush()

    return write


def find_function(function: Callable[..., Any]) -> dict[str, str]:
    """A function's address for another process: `{"module", "file", "name"}`; file: of a script.

    Raises OptionError for lambdas, nested functions, bound methods, and functions of a notebook.
    """
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or not module_name or not name:
        raise OptionError(f"{function!r} is no function with a name", where="run", remedy=_REMEDY)
    if "<" in name:
        kind = "a lambda" if "<lambda>" in name else "a function within a function"
        raise OptionError(f"{name} is {kind}: another process cannot import it", where="run", remedy=_REMEDY)
    module = sys.modules.get(module_name)
    if _find_attribute(module, name) != function:  # bound methods are equal, not the same
        raise OptionError(f"{module_name}:{name} is not this function", where="run", remedy=_REMEDY)
    if module_name != "__main__":
        return {"module": module_name, "file": "", "name": name}
    spec = getattr(module, "__spec__", None)
    if spec is not None:  # python -m package.module
        return {"module": spec.name, "file": "", "name": name}
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        raise OptionError(
            f"{name} is defined in a notebook or shell: another process cannot import it",
            where="run",
            remedy="write it into a file, and import it from there",
        )
    return {"module": "", "file": os.path.abspath(file), "name": name}


def load_function(place: Mapping[str, str]) -> Callable[..., Any]:
    """Load the function at `find_function`'s address. A script runs under the name `__rank__`."""
    if place["module"]:
        return _find_attribute(importlib.import_module(place["module"]), place["name"])  # type: ignore[no-any-return]
    import runpy
    import types

    module = types.ModuleType("__rank__")
    module.__dict__.update(runpy.run_path(place["file"], run_name="__rank__"))
    return _find_attribute(module, place["name"])  # type: ignore[no-any-return]


def _find_attribute(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner
