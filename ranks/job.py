"""A job: the processes that one launcher started, each of them a rank.

The launcher's variables say which (`places`, `launchers`). Without them a process is a job of its own, at which every
collective works. A job that was left leaves XLA's devices behind, so that arrays stay usable; the next one begins with
devices of its own.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
from jax.extend.backend import clear_backends

from shardwright.errors import CollectiveError, LaunchError, ShardwrightError
from shardwright.ranks import joining, launchers, lifeline, process_exit, programs_cache, stall, watch
from shardwright.ranks.dispatch import Dispatcher
from shardwright.ranks.joining import JoinOptions
from shardwright.ranks.places import Place, make_place, read_place
from shardwright.ranks.process_sets import ProcessSet
from shardwright.ranks.stall import StallInspector
from shardwright.ranks.tuning import DEFAULT_WARNING_S, LEAVING_PATIENCE_S
from shardwright.xla import private

_log = logging.getLogger("shardwright.ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A joined job. owns_connection: whether `shutdown` leaves `jax.distributed`."""

    place: Place
    world: ProcessSet
    owns_connection: bool
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    inspector: StallInspector | None = None


class _Process:
    """The job of this process, and its options. has_left: devices are still those of a job that was left."""

    job: Job | None = None
    options = JoinOptions()
    has_left = False


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    coordinator: str | None = None,
    timeout_s: float = 300,
    heartbeat_timeout_s: float = 100,
    stall_warning_s: float | None = None,
    stall_shutdown_s: float | None = None,
) -> None:
    """Join the job that the launcher's variables describe; call it before anything else of JAX. Twice is once.

    All ranks call it, and it returns once they have, with JAX's devices of all of them. `shardwright run`, torchrun,
    Open MPI, Slurm, TPU pods and Kubernetes' indexed jobs are known; a launcher that is not, or that does not say where
    rank 0 is, is refused by name. A program that has called `jax.distributed.initialize` itself keeps its ranks. On
    GPUs each rank of a host takes the device of its local rank, unless `CUDA_VISIBLE_DEVICES` or
    `JAX_LOCAL_DEVICE_IDS` says which.

    rank, size, coordinator: the place, instead of any variables; coordinator is `host:port` with a free port of rank
    0's host. size=1: this process alone. timeout_s: how long to wait for the others. heartbeat_timeout_s: after how
    long a silent rank counts as lost. stall_warning_s: how long a collective, `init` or `shutdown` may wait until a
    warning names the ranks that have not called it, and stall_shutdown_s: until it is an error. None: the launcher's
    values, else 60 and 0 (never). After `shutdown` it may be called again, by all ranks.

    Raises OptionError where variables make no sense, LaunchError where the job cannot be joined.
    """
    if _Process.job is not None:
        return
    options = JoinOptions(
        timeout_s=timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        stall_warning_s=stall.read_seconds(
            stall_warning_s, "SHARDWRIGHT_STALL_WARNING_S", DEFAULT_WARNING_S, os.environ
        ),
        stall_shutdown_s=stall.read_seconds(stall_shutdown_s, "SHARDWRIGHT_STALL_SHUTDOWN_S", 0.0, os.environ),
    )
    _Process.options = options
    is_given = not (rank is None and size is None and coordinator is None)
    if jax.distributed.is_initialized():
        _begin(_place_by_jax(os.environ), owns_connection=False)
    elif lifeline.is_elastic() and not is_given:
        _drop_devices()
        join_generation()
    else:
        _join(make_place(rank, size, coordinator) if is_given else launchers.find_place(os.environ))


def _join(place: Place) -> None:
    """Join the job of a place; a job of its own, alone."""
    _drop_devices()
    if place.size > 1:
        joining.check_unused_devices()
        place = joining.meet_others(place, _Process.options)
        watch.reset()
        joining.connect(place, _Process.options, os.environ)
        process_exit.leave_at_once_on_failure(_wait_at_exit)
    _begin(place, owns_connection=place.size > 1)


def _drop_devices() -> None:
    """Give up the devices of a job that was left: they know its ranks, and no others."""
    if _Process.has_left:
        _Process.has_left = False
        programs_cache.clear()
        clear_backends()  # type: ignore[no-untyped-call]
        private.forget_place_in_distributed()


def _begin(place: Place, *, owns_connection: bool) -> None:
    """Watch the job, and record its timeline for the launcher."""
    options, inspector = _Process.options, None
    if place.size > 1:
        inspector = StallInspector(place.rank, options.stall_warning_s, options.stall_shutdown_s)
    world = ProcessSet(range(place.size))
    _Process.job = Job(place=place, world=world, owns_connection=owns_connection, inspector=inspector)
    if place.size > 1:
        try:
            with watch.current().collective(world.ranks, "sw.ranks.init"):
                joining.open_devices(place)
        except LaunchError:
            _Process.job = None
            raise
    if path := os.environ.get("SHARDWRIGHT_TIMELINE"):
        from shardwright.ranks import timeline

        timeline.begin_generation(path)


# ---- generations -----------------------------------------------------------------
def join_generation(*, lost: bool = False) -> None:
    """Wait for the next generation of an elastic job, and join it. lost: the one before broke."""
    line = lifeline.connect()
    process_exit.leave_at_once_on_failure()
    variables = line.join(lost=lost)
    # For programs that read horovodrun's and torchrun's names; children of this process are no ranks by ours.
    os.environ |= {name: value for name, value in variables.items() if not name.startswith(("SHARDWRIGHT_", "JAX_"))}
    place = read_place({**os.environ, **variables})
    watch.reset()
    jax.config.update("jax_enable_recoverability", True)  # type: ignore[no-untyped-call]
    with line.changing():
        # One rank alone, too: JAX would keep the number of the generation before.
        joining.connect(place, _Process.options, os.environ)
        joining.open_devices(place)
    _begin(place, owns_connection=True)


def leave_generation() -> None:
    """Leave a generation of an elastic job, whole or broken. All arrays on devices are gone with it."""
    joined, line = _Process.job, lifeline.connect()
    line.end_collectives()
    _Process.job = None
    with line.changing(LEAVING_PATIENCE_S):
        if joined is not None:
            _disconnect(joined)
        clear_backends()  # type: ignore[no-untyped-call]
        gc.collect()
    line.has_left()


def _disconnect(joined: Job) -> None:
    joined.dispatcher.abandon()
    if joined.inspector is not None:
        joined.inspector.close()
    programs_cache.clear()
    _leave_distributed()


def _wait_at_exit() -> None:
    joined = _Process.job
    if joined is not None and joined.owns_connection:
        joining.wait_for_departures(joined.place)


def _leave_distributed() -> None:
    try:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:  # the others are gone, or the launcher's service
        _log.info("the job was left without the others: %s", error)
        private.forget_coordination_client()


def _place_by_jax(environment: Mapping[str, str]) -> Place:
    """The place of a process in `jax.distributed` already; the launcher's variables add the host's."""
    rank, size = private.place_in_distributed()
    with contextlib.suppress(ShardwrightError):
        named = launchers.find_place(environment)
        if (named.size, named.rank, named.has_neighbors) == (size, rank, True):
            return named
    return replace(Place(), size=size, rank=rank, local_rank=0, local_size=1, cross_rank=rank, cross_size=size)


def shutdown() -> None:
    """Leave the job, once all ranks leave it. Arrays on devices stay usable; collectives do not, until `init`."""
    joined = _Process.job
    if joined is None:
        return
    joined.dispatcher.close()
    if joined.owns_connection:
        with watch.current().collective(joined.world.ranks, "sw.ranks.shutdown"):
            if not lifeline.is_elastic():
                joining.wait_for_departures(joined.place)
            _leave_distributed()
        _Process.has_left = True
    if joined.inspector is not None:
        joined.inspector.close()
    _Process.job = None


def is_initialized() -> bool:
    """Whether `init` has been called."""
    return _Process.job is not None


def current() -> Job:
    """The job. Raises CollectiveError before `init`."""
    joined = _Process.job
    if joined is None:
        raise CollectiveError("this process has joined no job", remedy="call sw.ranks.init() first")
    return joined


def rank() -> int:
    """This process's number in the job, from 0."""
    return current().place.rank


def size() -> int:
    """How many processes the job has."""
    return current().place.size


def local_rank() -> int:
    """This process's number among those of its host."""
    return current().place.local_rank


def local_size() -> int:
    """How many processes the job has on this host."""
    return current().place.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process of this local rank."""
    return current().place.cross_rank


def cross_size() -> int:
    """How many hosts have a process of this local rank."""
    return current().place.cross_size


def generation() -> int:
    """How often the job has been formed anew: 0 unless ranks came or went."""
    return current().place.generation


def world() -> ProcessSet:
    """All ranks of the job."""
    return current().world


def resolve_process_set(process_set: ProcessSet | None) -> ProcessSet:
    """The ranks of a collective; None: all. Raises CollectiveError where this process is not among them."""
    everyone = current().world
    if process_set is None:
        return everyone
    process_set.place_of(rank())
    return process_set
