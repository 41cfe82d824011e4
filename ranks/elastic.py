"""Training that goes on while ranks come and go: `run` calls the training function anew, with the state as it was.

    state = sw.ranks.elastic.State(params=params, opt_state=opt_state, step=0)

    @sw.ranks.elastic.run
    def train(state):
        while state.step < 1000:
            state.params, state.opt_state = train_step(state.params, state.opt_state, batch_of(state.step))
            state.step += 1
            state.commit()

    train(state)

The ranks at one time are a generation. When it ends, because a rank was lost or others wait to come in, every rank
leaves it, takes the state of its last commit from host memory, joins the next one, and calls the function again. Ranks
that are new, or behind, get the state of one that is not. Arrays on devices that are not in the state are gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from shardwright import object_codec
from shardwright.errors import CollectiveError, LaunchError, OptionError, RankLostError
from shardwright.ranks import host_copies, job, lifeline, programs
from shardwright.ranks.collectives import allreduce
from shardwright.ranks.host_copies import HostCopy
from shardwright.ranks.objects import allgather_object, broadcast_object
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.sampler import ElasticSampler

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "State", "run"]

_R = TypeVar("_R")


class HostsUpdatedInterrupt(Exception):
    """Ranks wait to come in, or are to leave: no error; `run` catches it."""


class State:
    """What training goes on from: values by name, read and set as attributes.

    Values are trees of JAX's, numpy's or PyTorch's arrays, numbers, text; lists, tuples and dicts of them; objects with
    `state_dict` and `load_state_dict`; models and optimizers of Keras that are built. `commit` copies them to host
    memory: what came after the last one is lost with a rank. Make it after `sw.ranks.init()`, with the same names at
    every rank.
    """

    if TYPE_CHECKING:  # the values

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, **values: Any) -> None:
        reserved = [name for name in values if name.startswith("_") or hasattr(type(self), name)]
        if reserved:
            raise OptionError(f"{reserved[0]!r} cannot be a value's name", where="State", remedy="give it another name")
        self._names = tuple(values)
        self._callbacks: list[Callable[[], Any]] = []
        self._commits = 0
        for name, value in values.items():
            setattr(self, name, value)
        self._saved = self._copies()
        if carried := lifeline.take_carried():
            self._take(object_codec.loads(carried))
            self.restore()

    # ---- saving ----
    def commit(self) -> None:
        """Save the values, and let the ranks change. All ranks call it at the same point.

        Raises RankLostError and HostsUpdatedInterrupt, which `run` catches.
        """
        self.save()
        self.check_host_updates()

    def save(self) -> None:
        """Copy the values to host memory: what `restore` goes back to."""
        copies = self._copies()
        self._saved, self._commits = copies, self._commits + 1

    def restore(self) -> None:
        """Go back to the last commit; to the first values where there was none."""
        for name, saved in self._saved.items():
            setattr(self, name, host_copies.restore(saved, getattr(self, name)))

    def check_host_updates(self) -> None:
        """Let the ranks change, where they are to: saves, and raises HostsUpdatedInterrupt at all ranks, or at none."""
        line = lifeline.current()
        if line is None:
            return
        waiting = line.is_changed
        if job.size() > 1:
            waiting = allreduce(int(waiting), ReduceOp.MAX, name="elastic: hosts updated") > 0
        if waiting:
            self.save()
            raise HostsUpdatedInterrupt("ranks come or go: train in a function under sw.ranks.elastic.run")

    # ---- ranks ----
    def sync(self) -> None:
        """The state of the rank with most commits, at every rank; of rank 0, where none has committed."""
        commits = allgather_object(self._commits, name="elastic: commits")
        newest = max(commits)
        if newest > 0 and min(commits) == newest:
            return
        root = commits.index(newest)
        message: Any = None
        if job.rank() == root:
            if newest == 0:
                self._saved = self._copies()  # the values may have been set since
            message = self._message()
        self._take(broadcast_object(message, root, name="elastic: state"))
        self.restore()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Functions that are called once ranks have changed, before training goes on: the learning rate's, say."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """Called by `run` once this rank is in a new generation, with the values of its last commit."""
        for name in self._names:
            if isinstance(sampler := getattr(self, name), ElasticSampler):
                sampler.reset()
        for callback in self._callbacks:
            callback()

    # ---- copies ----
    def _copies(self) -> dict[str, HostCopy]:
        return {name: host_copies.copy_to_host(getattr(self, name)) for name in self._names}

    def _message(self) -> dict[str, Any]:
        packed = {name: host_copies.pack(saved, f"state.{name}") for name, saved in self._saved.items()}
        return {"commits": self._commits, "values": packed}

    def _as_bytes(self) -> bytes:
        return object_codec.dumps(self._message())

    def _take(self, message: dict[str, Any]) -> None:
        """Take over saved values. Raises CollectiveError where names or structures differ."""
        values = message["values"]
        if set(values) != set(self._names):
            raise CollectiveError(
                f"the ranks' states differ: {sorted(self._names)} here, {sorted(values)} at the others",
                where="State",
                remedy="give every rank's State the same names",
            )
        self._saved = {
            name: host_copies.unpack(values[name], self._saved[name], f"state.{name}") for name in self._names
        }
        self._commits = message["commits"]


def run(function: Callable[..., _R]) -> Callable[..., _R]:
    """`function(state, …)`, called anew with the state of the last commit whenever ranks come or go.

    Raises LaunchError where no launcher lets ranks come and go: `shardwright run --min-np 2 python train.py`.
    """

    @functools.wraps(function)
    def train(state: State, *args: Any, **kwargs: Any) -> _R:
        if not lifeline.is_elastic():
            raise LaunchError(
                "this process has no launcher that lets ranks come and go",
                where="sw.ranks.elastic.run",
                remedy=lifeline.NO_LAUNCHER_REMEDY,
            )
        job.init()
        line = lifeline.connect()
        line.take_state, line.commits = state._as_bytes, lambda: state._commits
        while True:
            try:
                state.sync()
                return function(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                lost = False
            except Exception as error:
                if not _is_loss(error):
                    raise
                lost = True
            # The error is gone here, and with it the frames that held arrays of the old generation.
            _start_over(state, lost)

    return train


def _start_over(state: State, lost: bool) -> None:
    job.leave_generation()
    job.join_generation(lost=lost)
    state.restore()
    state.on_reset()


def _is_loss(error: BaseException | None) -> bool:
    """Whether an error means that a rank is gone: one of a collective, or any of XLA's once a loss is known."""
    while error is not None:
        if isinstance(error, RankLostError):
            return True
        if isinstance(error, jax.errors.JaxRuntimeError | ValueError):
            line = lifeline.current()
            if programs.is_broken_collective(error) or (
                line is not None and line.is_lost and isinstance(error, jax.errors.JaxRuntimeError)
            ):
                return True
        error = error.__cause__
    return False
