"""An elastic rank's line to the launcher: it asks for generations, hears of losses, and frees a stuck process.

After a loss a rank's collective raises an error, and the rank leaves its generation. Sometimes no error comes: the
other ranks are alive and wait as well, or XLA is connecting to a lost rank. XLA offers no way out of either. Then the
process starts its program anew (`execve`), under its number, with the last commit of its state in a file in memory. No
state is lost, and no old thread survives.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardwright.errors import LaunchError, OptionError, RankLostError, ShardwrightError
from shardwright.launch import control
from shardwright.launch.control import ControlClient
from shardwright.ranks import watch
from shardwright.ranks.tuning import COLLECTIVES_POLL_S, LEAVING_POLL_S, PATIENCE_S

#: Names the descriptor of a file that holds the state of the program that ran before in this process.
CARRIED_VARIABLE = "SHARDWRIGHT_ELASTIC_CARRIED"

_DIRECTORY = os.getcwd()


class Lifeline:
    """The line of this process; one for its whole life.

    commits: returns the number of its state's commits, 0 at first. take_state: the bytes of the last one.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.generation = -1
        self.commits: Callable[[], int] = lambda: _carried_commits
        self.take_state: Callable[[], bytes] = lambda: b""
        self._lost = threading.Event()
        self._changed = threading.Event()
        self._away = threading.Event()
        self._changing: tuple[float, float] | None = None
        self._answers: queue.SimpleQueue[Mapping[str, str] | None] = queue.SimpleQueue()
        try:
            worker = int(environment[control.WORKER_VARIABLE])
            token = environment[control.TOKEN_VARIABLE]
        except (KeyError, ValueError):
            raise OptionError(
                "the launcher's variables are incomplete", where=control.WORKER_VARIABLE, remedy=NO_LAUNCHER_REMEDY
            ) from None
        self._client = ControlClient(environment[control.ADDRESS_VARIABLE], token, worker, self._on_message)

    # ---- generations ----
    def join(self, *, lost: bool = False) -> Mapping[str, str]:
        """Ask for a place in the next generation, and wait for it: the variables of `read_place`.

        lost: the generation before broke. Without a place the process ends with 0.
        """
        self._client.send(do="ready", lost=lost, commits=self.commits())
        place = self._answers.get()
        if place is None:
            _say("this rank's host is no longer among the job's: it leaves")
            raise SystemExit(0)
        return place

    @contextlib.contextmanager
    def changing(self, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """This rank joins or leaves a generation in the block. patience_s: how long that may take once it is lost."""
        self._changing = time.monotonic(), patience_s
        try:
            yield
        finally:
            self._changing = None

    def end_collectives(self) -> None:
        """Wait for this rank's collectives, on any thread; start anew if they do not end."""
        until_s = time.monotonic() + PATIENCE_S
        while watch.current().position() is not None:
            if time.monotonic() > until_s:
                self._start_anew()
            time.sleep(COLLECTIVES_POLL_S)

    def has_left(self) -> None:
        """This rank is out of its generation: it no longer needs to be got out."""
        self._away.set()

    @property
    def is_lost(self) -> bool:
        """Whether a rank of this generation is gone."""
        return self._lost.is_set()

    @property
    def is_changed(self) -> bool:
        """Whether the launcher waits for a commit, to form another generation."""
        return self._changed.is_set()

    def check(self) -> None:
        """Raise RankLostError once a rank of this generation is gone."""
        if self._lost.is_set():
            raise RankLostError(
                f"a rank of generation {self.generation} was lost",
                remedy="train in a function under sw.ranks.elastic.run, which goes on without it",
            )

    def report_stall(self, ranks: list[int], call: str, seconds: float) -> None:
        """Have the launcher end stalled ranks."""
        self._client.send(do="stalled", generation=self.generation, ranks=ranks, call=call, seconds=seconds)

    # ---- what the launcher says ----
    def _on_message(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "join":
                place = {str(name): str(value) for name, value in message["place"].items()}
                self.generation = int(place["SHARDWRIGHT_GENERATION"])
                for event in (self._lost, self._changed, self._away):
                    event.clear()
                self._answers.put(place)
            case "leave":
                self._answers.put(None)
            case "changed":
                self._changed.set()
            case "lost" if message["generation"] == self.generation and not self._lost.is_set():
                self._lost.set()
                threading.Thread(
                    target=self._get_out, args=(self.generation,), name="elastic-exit", daemon=True
                ).start()

    def _get_out(self, generation: int) -> None:
        """Wait until this rank has left; start anew if it is stuck."""
        lost_s = time.monotonic()
        while self.generation == generation and not self._away.wait(LEAVING_POLL_S):
            position, busy = watch.current().position(), self._changing
            if position is not None:
                busy = position.since_s, PATIENCE_S
            if busy is not None and time.monotonic() > max(lost_s, busy[0]) + busy[1]:
                self._start_anew()

    def _start_anew(self) -> None:
        """Run this process's program from its beginning, with the last commit; end it if none can be carried."""
        _say("a lost rank left this one stuck: its program starts anew, with the last commit")
        try:
            descriptor = _memory_file(self.take_state())
        except (ShardwrightError, OSError) as error:
            _say(f"the state cannot be carried over: {error}")
            os._exit(1)
        environment = {**os.environ, CARRIED_VARIABLE: f"{descriptor}:{self.commits()}"}
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        _keep_open(descriptor)
        os.chdir(_DIRECTORY)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


NO_LAUNCHER_REMEDY = "start elastic ranks with: shardwright run --min-np 2 --max-np 4 python train.py"


def _say(text: str) -> None:
    os.write(2, f"shardwright: {text}\n".encode())


def _memory_file(data: bytes) -> int:
    """A descriptor of a file without a name, in memory on Linux."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardwright-state")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _keep_open(descriptor: int) -> None:
    """Of all files and sockets, let this one and the standard streams outlive the program."""
    folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    for name in os.listdir(folder):
        number = int(name)
        if number > 2:
            try:
                os.set_inheritable(number, number == descriptor)
            except OSError:
                continue


def take_carried() -> bytes:
    """The state of the earlier program in this process; empty without one, and at the second call."""
    global _carried
    state, _carried = _carried, b""
    return state


def _read_carried() -> tuple[bytes, int]:
    """The state from `_start_anew`, and its number of commits."""
    descriptor, _, commits = os.environ.pop(CARRIED_VARIABLE, "").partition(":")
    if not descriptor:
        return b"", 0
    with os.fdopen(int(descriptor), "rb") as file:
        return file.read(), int(commits)


_carried, _carried_commits = _read_carried()


class _Process:
    lifeline: Lifeline | None = None


def is_elastic() -> bool:
    """Whether the launcher started this process as an elastic rank."""
    return control.ADDRESS_VARIABLE in os.environ


def current() -> Lifeline | None:
    """This process's line; None before it is needed, and for ranks that stay."""
    return _Process.lifeline


def connect() -> Lifeline:
    """This process's line, made at the first call. Raises LaunchError, OptionError."""
    if _Process.lifeline is None:
        if not is_elastic():
            raise LaunchError("this process has no launcher that lets ranks come and go", remedy=NO_LAUNCHER_REMEDY)
        _Process.lifeline = Lifeline(os.environ)
    return _Process.lifeline
