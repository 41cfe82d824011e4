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
from shardwright.client.credentials import dialer_for
from shardwright.client.embedded import EmbeddedServer
from shardwright.client.recovery import Recovered
from shardwright.client.session_state import SessionState
from shardwright.clusters.module_names import check_module_names
from shardwright.errors import OptionError
from shardwright.options.user_options import UserOptions, show_options
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import master_pb2
from shardwright.protocol.session_secrets import MAX_NAME, is_name

if TYPE_CHECKING:
    from shardwright.client.automatic_saves import CheckpointPolicy
    from shardwright.client.checkpoints import Save
    from shardwright.client.datasets import Dataset
    from shardwright.client.kept import Resumed
    from shardwright.client.step import Step
    from shardwright.hlo.entry import Names
    from shardwright.xla.formats import ProgramSource


def connect(
    address: str | int | None = None,
    *,
    devices: int = 8,
    token: str | None = None,
    name: str | None = None,
    snapshot_every: int | None = None,
    dataset_modules: str | Sequence[str] | None = None,
) -> Session:
    """Opens a session.

    Args:
      address: "host:port" of a server ("[::1]:2222" in IPv6), or the port of one on this machine. Default: `$SERVER_IP`
        and `$SERVER_PORT`; without those a child process serves and ends with the session.
      devices: CPU devices of the child.
      token: the server's access token; default `$SHARDWRIGHT_TOKEN`. Servers that this user started on this machine
        need none. With TLS, `$SHARDWRIGHT_CA` names the trusted certificate file.
      name: of the session. One of this name that another process has left, by a crash or by `leave`, is taken up: its
        programs are loaded, and `Session.resume` finds what it kept. One process at a time has it: the last one. It
        takes the token that the session was opened with.
      snapshot_every: survive losses of workers, whatever runs in the session: see `Session.parallelize`.
      dataset_modules: names of modules and packages whose functions `Session.dataset` may read batches from, with the
        child as server. The operator of other servers says so when they start.

    Raises ServerUnavailableError: nothing answers. AuthenticationError: wrong token. OptionError: a wrong option.
    """
    server = None
    every, name = read_snapshot_every(snapshot_every), read_name(name)
    modules = _read_dataset_modules(dataset_modules)
    address = address_from_environment() if address is None else read_address(address)
    if address is None and name:
        raise OptionError(
            f"name={name!r}",
            where="name",
            remedy="give the address of a server: an embedded one, and its sessions, end with this program",
        )
    if address is not None and modules:
        raise OptionError(
            f"the servers at {address} are another program's: what they read is said when they start",
            where="dataset_modules",
            remedy=f"start them with --dataset-modules {','.join(modules)}, or name the modules in the cluster file",
        )
    if address is None:
        server = EmbeddedServer(devices, modules)
        address, dialer = server.address, Dialer(server.token, None)
    else:
        dialer = dialer_for(address, token)
    state = None
    try:
        state = SessionState(address, dialer, server, name)
        if every:
            state.steps.protect(every)
        return Session(state)
    except BaseException:
        if state is not None:
            state.close_quietly()
        elif server is not None:
            server.close()
        raise


def read_name(name: str | None) -> str:
    """ "": no name. Raises OptionError on anything but a short text."""
    if name is None:
        return ""
    if not isinstance(name, str) or not is_name(name):
        raise OptionError(
            f"name={name!r}", where="name", remedy=f"a text of 1 to {MAX_NAME} printable characters, e.g. 'run-7'"
        )
    return name


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


def _read_dataset_modules(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Raises OptionError on what names no modules."""
    try:
        return check_module_names([names] if isinstance(names, str) else names or ())
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"dataset_modules={names!r}: {error}",
            where="dataset_modules",
            remedy='e.g. "my_data", or ["my_data", "b.c"]',
        ) from None


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
          step_timeout: seconds, 1 or more, that a call may run on the servers, from the end of those before it. Then it
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

    def dataset(self, function: str, *, batch: int, prefetch: int = 2, **options: Any) -> Dataset:
        """Batches that the workers read themselves: an iterator of pytrees of handles, which steps take as arguments.

        A worker reads the rows that its devices hold, under whatever plan the step has, some batches ahead; nothing
        passes this program. The data are read from where `seek` says, else from batch 0 on.

        Args:
          function: "module:function", importable by the servers, of a module that their operator allows
            (`--dataset-modules`, `dataset_modules` in the cluster file or in `connect`). It is called on the workers
            as `function(start, batch=batch, rows=rows, **options)` and yields the batches `start`, `start + 1`, …, each
            a pytree of arrays with one entry along the first dimension for each of `rows`, an int64 array of row
            numbers of the whole batch, ascending. A leaf may be a function without arguments, called where it is
            needed. Equal arguments have to give equal batches.
          batch: rows of a batch, over all workers.
          prefetch: batches that are read ahead.
          options: further arguments of the function: JSON values.

        Raises DatasetError: the module is not allowed, there is no such function, it raises, or what it yields is no
        batch. OptionError: a wrong option.
        """
        from shardwright.client.datasets import Dataset

        return Dataset(self._state.steps, function, batch=batch, prefetch=prefetch, options=options)

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
        return self._state.saves.save(state, directory, step=step, max_to_keep=max_to_keep)

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
        return self._state.saves.restore(directory, step=step, like=like)

    def checkpoints(self, directory: str | os.PathLike[str]) -> tuple[int, ...]:
        """Numbers of the checkpoints completed by Orbax in a directory, ascending; waits for an unfinished save.

        directory: see `save`. Raises CheckpointError when it is none, or cannot be listed.
        """
        return self._state.saves.list_checkpoints(directory)

    def keep(self, state: Any, *, checkpoints: CheckpointPolicy | None = None, step: int | None = None) -> None:
        """Keeps a state for the next program: of a session with a name, in checkpoints, or both.

        From now on the state is followed: where a step takes some of it over, its results are kept in its place. In a
        session with a name the servers know it, in one with the step, and `resume` of the program that takes the
        session up next finds it, whenever this one ends. The state kept before is kept no longer.

        state: a pytree of handles; arrays and numbers in it are sent to the servers.
        checkpoints: when it is written to checkpoints as well, beside the steps. One that fails is logged; training
          goes on.
        step: number of the state, from which those of the checkpoints count on, one for each step that replaces some of
          it. Default: the latest checkpoint's; of a state that was resumed, the steps of the programs before, if more.

        Raises OptionError: the session has no name, and no checkpoints are asked for; a wrong number. CheckpointError:
        the state cannot be written down, or the directory is none.
        """
        from shardwright.client import kept

        self._state.cluster.require_open()
        kept.keep(self._state, state, checkpoints, step)

    def resume(self, *, like: Any = None) -> Resumed | None:
        """What the program before has kept in the session that this one took up; None where there is nothing.

        Where the executors are the same, it is the state after the last step that began; else that of the newest
        snapshot. Other arrays of the program before are gone. Call `keep` again, for this one's successor.

        like: a pytree of the structure that was kept. Needed when it has nodes other than dicts, lists, tuples and
        named tuples.

        Raises SnapshotLostError: the state is lost. CheckpointError: the structure cannot be made without `like`.
        """
        from shardwright.client import kept

        self._state.cluster.require_open()
        return kept.resume(self._state.steps, like)

    def leave(self) -> None:
        """Ends this program's use of a session with a name, which waits for the next program; see `close`.

        The end of the program without `close`, by an exception or by a kill, does the same. The servers keep it for an
        hour, unless told otherwise (`--named-grace`).
        """
        self._state.leave()

    @property
    def draining(self) -> str:
        """What of the servers is about to end, and why: "node 1 will leave (SIGTERM)"; "" where nothing is.

        Meanwhile saves and reads of arrays work, and a step raises ServerDrainingError before it takes anything over.
        """
        return self._state.draining

    @property
    def recoveries(self) -> tuple[Recovered, ...]:
        """The losses of workers that steps with `snapshot_every` survived, in order."""
        return tuple(self._state.steps.recovery.recovered)

    def status(self) -> master_pb2.StatusReply:
        """State of the cluster and of its sessions."""
        self._state.cluster.require_open()
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
        return f"Session({self._state.master.address}, {'closed' if self._state.cluster.is_closed else devices})"
