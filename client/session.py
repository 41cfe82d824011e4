"""`shardwright.connect`: a session with a server, and what a user calls of it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shardwright.client.addresses import read_address, read_host, read_port
from shardwright.client.connection import Dialer
from shardwright.client.embedded import EmbeddedServer
from shardwright.client.session_state import SessionState
from shardwright.cluster import join_address
from shardwright.errors import OptionError, ShardwrightError
from shardwright.options import Force, MemoryBudget, Mesh, plan_options
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import master_pb2

if TYPE_CHECKING:
    from shardwright.client.checkpoints import Save
    from shardwright.client.step import Step

_log = logging.getLogger("shardwright")


def connect(address: str | int | None = None, *, devices: int = 8, token: str | None = None) -> Session:
    """Opens a session.

    Args:
      address: "host:port" of a server ("[::1]:2222" for IPv6), or the port of one on this machine. Without it
        `$SERVER_IP` and `$SERVER_PORT` name
        one; without those a server is started as a child process, which ends with
        the session.
      devices: CPU devices of the child, where one is started.
      token: what the server asks for; default `$SHARDWRIGHT_TOKEN`. For a server with
        TLS, `$SHARDWRIGHT_CA` names the file of the certificate to trust.

    Raises ServerUnavailableError where nothing answers, AuthenticationError for a wrong token.
    """
    server = None
    address = _address_from_environment() if address is None else read_address(address)
    if address is None:
        server = EmbeddedServer(devices)
        address, token = server.address, server.token
        ca_file = None
    else:
        token = token or os.environ.get("SHARDWRIGHT_TOKEN")
        ca_file = os.environ.get("SHARDWRIGHT_CA")
    try:
        return Session(address, Dialer(token, ca_file), server)
    except BaseException:
        if server is not None:
            server.close()
        raise


def _address_from_environment() -> str | None:
    host, port = os.environ.get("SERVER_IP"), os.environ.get("SERVER_PORT")
    if not host and not port:
        return None
    if not host or not port:
        missing = "SERVER_PORT" if host else "SERVER_IP"
        raise OptionError("half an address in the environment", where=missing, remedy=f"set {missing} as well")
    return join_address(read_host(host, where="SERVER_IP"), read_port(port, where="SERVER_PORT"))


class Session(SessionState):
    """A name space of programs and arrays on a server; a context manager.

    Made by `connect`. Closing it frees everything it holds there.
    """

    def __init__(self, address: str, dialer: Dialer, server: EmbeddedServer | None) -> None:
        self._server = server
        self._pid = os.getpid()
        self._save: Save | None = None
        self._saving = threading.Lock()
        super().__init__(address, dialer)
        _open_sessions.add(self)

    # ---- what a user calls ----------------------------------------------------------

    def parallelize(
        self,
        fn: Callable[..., Any],
        *,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        mesh: Mesh = None,
        force: Force = None,
        memory_budget: MemoryBudget = None,
        deadline: float | None = None,
        effort: str | None = None,
        rewrites: str | None = None,
        remat: str | None = None,
        mode: str | None = None,
        stages: int | None = None,
        micro_batches: int | None = None,
        micro_batch_inexact: bool = False,
        schedule: str | None = None,
        imbalance: float | None = None,
        constraints: str | None = None,
        progress: Callable[[PlanProgress], None] | None = None,
    ) -> Step:
        """`fn` as a step that runs on the servers; call it as you would `jax.jit(fn, ...)`.

        Args:
          donate_argnums, donate_argnames: arguments whose arrays are updated in place; their handles are gone
            afterwards. Where neither is given, those that `fn` donates if it is a `jax.jit`.
          static_argnums, static_argnames: arguments that are part of the program, by value; those of `fn`, if it is
            a `jax.jit`, are static as well.
          mesh: "2x4", (2, 4) or {"data": 2, "model": 4}, up to three axes; default: the planner chooses.
          force: "data", "tensor", "mixed", "megatron", "expert", "zero1", "fsdp" or "replicated", or
            argument name pattern → {dimension: axis, True ("split somewhere") or None ("not split")}.
          memory_budget: what the plan may take of one device: bytes, "40GB", "36GiB", or a part of
            its memory (0.5, "50%"); default: all of it.
          deadline: seconds after which the best plan found so far is taken; 2 seconds or a fifth later there is a
            plan or an error.
          effort: "fast", "default" or "best": how hard the planner searches (`options.plan_options`).
          rewrites: "auto" (default) or "none": plan the program as it stands.
          remat: what the backward pass finds computed again instead of kept: "auto" (default) as much as the memory
            makes necessary, "none", or "full".
          mode: "search" (default), or "propagate": follow the annotations and search nothing.
          micro_batches: parts of the batch that are computed one after the other, their gradients added up: less
            memory for the same result. Default: as the planner sees fit; 1: the batch at once.
          micro_batch_inexact: let what needs the whole batch (batch norm's statistics) be that of each micro-batch.
          stages: pipeline stages, each on devices of its own; 1 for none. Default: the planner chooses.
          schedule: "gpipe", "1f1b", "interleaved", … (`shardwright.tasks.SCHEDULE_NAMES`).
          imbalance: how much longer than the average stage the slowest one may take, as a part of that; default: as
            little as can be.
          constraints: "keep" (default) the shardings that the function brings along (`with_sharding_constraint`,
            `in_shardings`, …), or "ignore" them; annotations count in either case.
          progress: called in this thread with a `PlanProgress` as planning goes on.

        Raises OptionError for a wrong option. Nothing is traced before the first call.
        """
        from shardwright.client.frontends.jax import JaxFunction
        from shardwright.client.step import Step

        options = plan_options(
            mesh=mesh, force=force, memory_budget=memory_budget, deadline=deadline, effort=effort, rewrites=rewrites,
            remat=remat, mode=mode, stages=stages, micro_batches=micro_batches, schedule=schedule,
            micro_batch_inexact=micro_batch_inexact, imbalance=imbalance, constraints=constraints,
        )  # fmt: skip
        function = JaxFunction(
            fn, donate_argnums=donate_argnums, donate_argnames=donate_argnames,
            static_argnums=static_argnums, static_argnames=static_argnames,
        )  # fmt: skip
        return Step(self, function, options, progress)

    def save(
        self, state: Any, directory: str | os.PathLike[str], *, step: int | None = None, max_to_keep: int | None = None
    ) -> Save:
        """Writes `state` as it is after the last step sent, as checkpoint number `step` of `directory`.

        Returns at once; later steps may change or donate the arrays. The next save and `close` wait
        until it is complete, and raise what went wrong, unless `Save.wait` has. An interrupted save
        leaves the checkpoints that are complete as they are.

        Args:
          state: a pytree of handles; arrays and numbers in it are sent to the servers first.
          directory: as every worker sees it: an absolute path on a file system that they share, or a URL that Orbax
            takes ("gs://…"). A relative path and "~" are resolved here where `connect` started the server, and refused
            where it runs elsewhere. It is made, with its parents. One session at a time saves in it, from its first
            save until it is closed. Orbax reads it, with or without Shardwright.
          step: default: one more than the latest in the directory.
          max_to_keep: remove older checkpoints beyond so many, once this one is complete. Only what Shardwright
            wrote is counted and removed; one into which you have put something stays.

        Raises CheckpointError for a state that cannot be written and a directory that is none, OptionError for a wrong
        number. `Save.wait` raises CheckpointError where another session saves in the directory, and where `step` does
        not come after its checkpoints or names something else.
        """
        from shardwright.client import checkpoints

        self.require_open()
        with self._saving:
            if self._save is not None and (error := self._save.take_unreported_error()) is not None:
                raise error
            self._save = checkpoints.save(self, state, directory, step=step, max_to_keep=max_to_keep)
            return self._save

    def restore(self, directory: str | os.PathLike[str], *, step: int | None = None, like: Any = None) -> Any:
        """The state of a checkpoint, as handles; arrays are read when a step is first called with them.

        Then each worker reads its own part, as the step's plan lays it out, whatever the plan or
        the number of workers was when it was saved. Waits for a save of this session that is under way.

        Args:
          step: number of the checkpoint; default: the latest.
          like: a pytree of the structure and the types to restore, e.g. what `step.init` returns (which
            then does not run), or `jax.eval_shape` does. It may be a part of what was saved. Needed
            for states with nodes other than dicts, lists, tuples and named tuples.

        Raises CheckpointError where there is no such checkpoint, or it does not hold what `like` asks for.
        """
        from shardwright.client import checkpoints

        self.require_open()
        if self._save is not None:
            self._save.settle()
        return checkpoints.restore(self, directory, step=step, like=like)

    def checkpoints(self, directory: str | os.PathLike[str]) -> tuple[int, ...]:
        """Numbers of the checkpoints in a directory that Orbax completed, ascending; waits for a save under way.

        The directory is named as for `save`. Raises CheckpointError where it is none, or cannot be listed.
        """
        from shardwright.client import checkpoints

        self.require_open()
        if self._save is not None:
            self._save.settle()
        return checkpoints.checkpoints(self, directory)

    def status(self) -> master_pb2.StatusReply:
        """State of the cluster and of its sessions."""
        self.require_open()
        return self.master.status()

    def close(self) -> None:
        """Waits for a save under way, frees what the session holds on the server, stops an embedded server.

        May be called twice. Raises the error of a save that nobody has met yet.
        """
        error = self._close()
        if error is not None:
            raise error

    def _close(self) -> ShardwrightError | None:
        """The error of a save that nobody has met yet."""
        if self._is_closed or os.getpid() != self._pid:  # a forked child leaves its parent's session alone
            return None
        error = self._save.take_unreported_error() if self._save is not None else None
        self._end()
        if self._server is not None:
            self._server.close()
        return error

    def close_quietly(self) -> None:
        """Where nobody is left to raise an error to."""
        error = self._close()
        if error is not None:
            _log.error("the last save failed: %s", error)

    def __del__(self) -> None:
        if hasattr(self, "_dropped"):  # else it was never opened
            self.close_quietly()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close_quietly()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.info.device_count} {self.info.platform} devices"
        return f"Session({self.master.address}, {state})"


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_sessions() -> None:
    for session in list(_open_sessions):
        session.close_quietly()
