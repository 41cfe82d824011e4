"""`shardwright.connect`: a session with a server, and its user interface."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.builders.choices import read_options
from shardwright.client.addresses import address_from_environment, read_address
from shardwright.client.connection import Dialer, SessionInfo
from shardwright.client.embedded import EmbeddedServer
from shardwright.client.recovery import Recovered
from shardwright.client.session_state import SessionState
from shardwright.errors import OptionError
from shardwright.options.user_options import UserOptions, show_options
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import master_pb2

if TYPE_CHECKING:
    from shardwright.client.checkpoints import Save
    from shardwright.client.step import Step
    from shardwright.hlo.entry import Names
    from shardwright.xla.formats import ProgramSource


def connect(
    address: str | int | None = None, *, devices: int = 8, token: str | None = None, snapshot_every: int | None = None
) -> Session:
    """Opens a session.

    Args:
      address: "host:port" of a server ("[::1]:2222" in IPv6), or the port of one on this machine. Default: `$SERVER_IP`
        and `$SERVER_PORT`; without those a child process serves and ends with the session.
      devices: CPU devices of the child.
      token: the server's access token; default `$SHARDWRIGHT_TOKEN`. With TLS, `$SHARDWRIGHT_CA` names the trusted
        certificate file.
      snapshot_every: survive losses of workers, whatever runs in the session: see `Session.parallelize`.

    Raises ServerUnavailableError: nothing answers. AuthenticationError: wrong token. OptionError: a wrong option.
    """
    server = None
    every = read_snapshot_every(snapshot_every)
    address = address_from_environment() if address is None else read_address(address)
    if address is None:
        server = EmbeddedServer(devices)
        address, token = server.address, server.token
        ca_file = None
    else:
        token = token or os.environ.get("SHARDWRIGHT_TOKEN")
        ca_file = os.environ.get("SHARDWRIGHT_CA")
    try:
        state = SessionState(address, Dialer(token, ca_file), server)
        if every:
            state.protect(every)
        return Session(state)
    except BaseException:
        if server is not None:
            server.close()
        raise


def read_snapshot_every(snapshot_every: int | None) -> int:
    """0: no snapshots. Raises OptionError on anything but a positive whole number."""
    if snapshot_every is None:
        return 0
    if isinstance(snapshot_every, bool) or not isinstance(snapshot_every, int) or snapshot_every < 1:
        raise OptionError(
            f"snapshot_every={snapshot_every!r}",
            where="snapshot_every",
            remedy="a number of steps, from 1 on, or None for no snapshots",
        )
    return snapshot_every


def _timeout_s(step_timeout: float | None) -> float:
    """0.0: the server's choice. Raises OptionError on anything but positive seconds."""
    if step_timeout is None:
        return 0.0
    is_number = isinstance(step_timeout, int | float) and not isinstance(step_timeout, bool)
    if not is_number or not 0 < step_timeout < math.inf:
        raise OptionError(
            f"step_timeout={step_timeout!r}",
            where="step_timeout",
            remedy="seconds, more than 0, or None for the default",
        )
    return float(step_timeout)


class Session:
    """A name space of programs and arrays on a server; a context manager.

    Made by `connect`. Closing it frees everything it holds there.
    """

    def __init__(self, state: SessionState) -> None:
        self._state = state

    @property
    def info(self) -> SessionInfo:
        """The server's reply to opening the session: its devices and limits."""
        return self._state.info

    @show_options
    def parallelize(
        self,
        fn: Callable[..., Any],
        *,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        progress: Callable[[PlanProgress], None] | None = None,
        step_timeout: float | None = None,
        snapshot_every: int | None = None,
        **options: Unpack[UserOptions],
    ) -> Step:
        """`fn` wrapped in a step that runs on the servers; it is called like `jax.jit(fn, ...)`.

        Args:
          donate_argnums, donate_argnames: arguments updated in place; their handles are gone afterwards. Default: those
            of `fn`, when it is a `jax.jit`.
          static_argnums, static_argnames: arguments compiled into the program by value, besides those of a `jax.jit`.
          progress: called in this thread with a `PlanProgress` during planning.
          step_timeout: seconds that a call may run on the servers, from the end of the calls before it. Afterwards it
            fails with StepTimeoutError, the executors are replaced, and the arrays of every session are gone. Default:
            ten minutes, a hundred times the plan's prediction, or ten times its longest run so far; the longest counts.
          snapshot_every: every so many steps of the session, all its arrays are copied to the memory of the servers'
            daemons, while training goes on. After a loss of workers the newest complete copy is restored and the steps
            since run again: handles stay valid, results are the same. This program keeps what it sent since that copy,
            in up to three times so many steps. Default: no copies, and a loss raises WorkerLostError.

        Raises OptionError: a wrong option. Nothing is traced before the first call.
        """
        from shardwright.client.frontends.jax import JaxFunction
        from shardwright.client.step import Step

        builder, checked = read_options(options)
        function = JaxFunction(
            fn, donate_argnums=donate_argnums, donate_argnames=donate_argnames,
            static_argnums=static_argnums, static_argnames=static_argnames,
        )  # fmt: skip
        return Step(
            self._state, function, checked, progress, builder,
            timeout_s=_timeout_s(step_timeout), snapshot_every=read_snapshot_every(snapshot_every),
        )  # fmt: skip

    @show_options
    def program(
        self,
        hlo: ProgramSource,
        *,
        names: Names | None = None,
        donated: Iterable[int | str] | int | str | None = None,
        results: Any = None,
        name: str | None = None,
        progress: Callable[[PlanProgress], None] | None = None,
        **options: Unpack[UserOptions],
    ) -> Step:
        """A program of any framework as a step, called with arrays by position or by name.

        The types are the program's own, 64-bit ones included. Several programs may share one state: a handle returned
        by one may be passed to another.

        Args:
          hlo: HLO text, StableHLO text, the bytes of a serialized HloModuleProto or of StableHLO bytecode, or the path
            of a file with one of them.
          names: of the arguments: all in order, or some by number or by the text's own name. Default: the text's.
          donated: numbers or names of arguments updated in place; their handles are gone after a call. Each is paired
            with an output of its type. Default: those that the program aliases with outputs; `()` for none.
          results: structure of the result, a pytree of output numbers, e.g. `{"loss": 0, "w": 1}`. Outputs left out are
            dropped. Default: the program's tuple, or its one array.
          name: in messages; default: the module's.
          progress: called in this thread with a `PlanProgress` during planning.

        Raises HloSyntaxError: it cannot be read. UnsupportedProgramError: it cannot run, for want of constants or of
        fixed shapes. OptionError: a wrong option. A call raises ArgumentError where its arguments do not fit.
        """
        from shardwright.client.frontends.hlo import HloFunction
        from shardwright.client.step import Step
        from shardwright.xla.formats import read_program

        builder, checked = read_options(options)
        function = HloFunction(read_program(hlo), names=names, donated=donated, results=results, name=name)
        return Step(self._state, function, checked, progress, builder)

    def save(
        self, state: Any, directory: str | os.PathLike[str], *, step: int | None = None, max_to_keep: int | None = None
    ) -> Save:
        """Writes `state`, after the last step sent, under checkpoint number `step` of `directory`.

        Returns at once; later steps may change or donate the arrays. The next save and `close` wait until it is
        complete, and raise its error unless `Save.wait` has. An interrupted save leaves the complete checkpoints
        unchanged.

        Args:
          state: a pytree of handles; arrays and numbers in it are sent to the servers first.
          directory: the workers' path of it: absolute, on a shared file system, or a URL known to Orbax ("gs://…"). A
            relative path and "~" are resolved here when `connect` started the server, and refused otherwise. It is
            made, with its parents. One session at a time saves in it, from its first save until it is closed. Orbax
            reads it, with or without Shardwright.
          step: default: one more than the latest in the directory.
          max_to_keep: number of checkpoints to keep; older ones are removed once this one is complete. Only
            Shardwright's own checkpoints are counted and removed; one with files of yours stays.

        Raises CheckpointError: the state cannot be written, or the directory is none. OptionError: a wrong number.
        `Save.wait` raises CheckpointError when another session saves in the directory, and when `step` does not follow
        its checkpoints or names something else.
        """
        return self._state.save(state, directory, step=step, max_to_keep=max_to_keep)

    def restore(self, directory: str | os.PathLike[str], *, step: int | None = None, like: Any = None) -> Any:
        """The state of a checkpoint, in handles; arrays are read when a step is first called with them.

        Each worker then reads its own part under the step's plan; plan and worker count of the save do not matter.
        Waits for an unfinished save of this session.

        Args:
          step: number of the checkpoint; default: the latest.
          like: a pytree of the structure and the types to restore, e.g. the result of `step.init` (which then does not
            run) or of `jax.eval_shape`. It may be a part of the saved state. Needed when the state has nodes other than
            dicts, lists, tuples and named tuples.

        Raises CheckpointError: no such checkpoint, or `like` asks for missing contents.
        """
        return self._state.restore(directory, step=step, like=like)

    def checkpoints(self, directory: str | os.PathLike[str]) -> tuple[int, ...]:
        """Numbers of the checkpoints completed by Orbax in a directory, ascending; waits for an unfinished save.

        directory: see `save`. Raises CheckpointError when it is none, or cannot be listed.
        """
        return self._state.list_checkpoints(directory)

    @property
    def draining(self) -> str:
        """What of the servers is about to end, and why: "node 1 will leave (SIGTERM)"; "" where nothing is.

        Meanwhile saves and reads of arrays work, and a step raises ServerDrainingError before it takes anything over.
        """
        return self._state.draining

    @property
    def recoveries(self) -> tuple[Recovered, ...]:
        """The losses of workers that steps with `snapshot_every` survived, in order."""
        return tuple(self._state.recovery.recovered)

    def status(self) -> master_pb2.StatusReply:
        """State of the cluster and of its sessions."""
        self._state.require_open()
        return self._state.master.status()

    def close(self) -> None:
        """Waits for an unfinished save, frees the session's arrays on the server, stops an embedded server.

        May be called twice. Raises a save's error not raised before.
        """
        self._state.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._state.close_quietly()

    def __repr__(self) -> str:
        devices = f"{self.info.device_count} {self.info.platform} devices"
        return f"Session({self._state.master.address}, {'closed' if self._state.is_closed else devices})"
