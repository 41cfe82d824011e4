"""A job: the processes that one launcher started, each of them a rank.

The launcher (`shardwright run`) sets `SHARDWRIGHT_COORDINATOR` (host:port of the coordination service),
`SHARDWRIGHT_SIZE`, `SHARDWRIGHT_RANK`, `…_LOCAL_RANK`, `…_LOCAL_SIZE`, `…_CROSS_RANK`, `…_CROSS_SIZE` and
`…_GENERATION`. Without them a process is a job of its own, at which every collective works.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
from jax.extend.backend import clear_backends

from shardwright.errors import CollectiveError, LaunchError, OptionError
from shardwright.ranks import lifeline, process_exit, programs_cache, stall, watch
from shardwright.ranks.dispatch import Dispatcher
from shardwright.ranks.process_sets import ProcessSet
from shardwright.ranks.stall import StallInspector
from shardwright.xla import private

#: Rank 0's `jax.distributed.initialize` starts a service in any case; the launcher's is the one that ranks ask.
_UNUSED_SERVICE = "127.0.0.1:0"
_DEVICE_LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's place in its job, from the launcher's variables."""

    coordinator: str = ""
    size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A joined job. owns_connection: whether `shutdown` leaves `jax.distributed`."""

    place: Place
    world: ProcessSet
    owns_connection: bool
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    inspector: StallInspector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The arguments of `init`."""

    timeout_s: float = 300.0
    heartbeat_timeout_s: float = 100.0
    stall_warning_s: float = stall.DEFAULT_WARNING_S
    stall_shutdown_s: float = 0.0


class _Process:
    """The job of this process, and its options."""

    job: Job | None = None
    options = _Options()


def init(
    *,
    timeout_s: float = 300,
    heartbeat_timeout_s: float = 100,
    stall_warning_s: float | None = None,
    stall_shutdown_s: float | None = None,
) -> None:
    """Join the job that the launcher's variables describe; call it before anything else of JAX. Twice is once.

    A program that has called `jax.distributed.initialize` itself keeps its ranks. On GPUs each rank of a host takes
    the device of its local rank, unless `CUDA_VISIBLE_DEVICES` or `JAX_LOCAL_DEVICE_IDS` says which.

    timeout_s: how long to wait for the others. heartbeat_timeout_s: after how long a silent rank counts as lost.
    stall_warning_s: how long a collective may wait until a warning names the ranks that have not called it, and
    stall_shutdown_s: until it is an error. None: the launcher's values, else 60 and 0 (never).
    Raises OptionError where variables make no sense, LaunchError where the job cannot be joined.
    """
    if _Process.job is not None:
        return
    options = _Options(
        timeout_s=timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        stall_warning_s=stall.read_seconds(
            stall_warning_s, "SHARDWRIGHT_STALL_WARNING_S", stall.DEFAULT_WARNING_S, os.environ
        ),
        stall_shutdown_s=stall.read_seconds(stall_shutdown_s, "SHARDWRIGHT_STALL_SHUTDOWN_S", 0.0, os.environ),
    )
    _Process.options = options
    if jax.distributed.is_initialized():
        _begin(_place_by_jax(os.environ), owns_connection=False)
    elif lifeline.is_elastic():
        join_generation()
    else:
        place = read_place(os.environ)
        if place.size > 1:
            _connect(place, options)
            process_exit.leave_at_once_on_failure()
        _begin(place, owns_connection=place.size > 1)


def _begin(place: Place, *, owns_connection: bool) -> None:
    """Watch the job, and record its timeline for the launcher."""
    options, inspector = _Process.options, None
    if place.size > 1:
        inspector = StallInspector(place.rank, options.stall_warning_s, options.stall_shutdown_s)
    world = ProcessSet(range(place.size))
    _Process.job = Job(place=place, world=world, owns_connection=owns_connection, inspector=inspector)
    if path := os.environ.get("SHARDWRIGHT_TIMELINE"):
        from shardwright.ranks import timeline

        timeline.begin_generation(path)


# ---- generations -----------------------------------------------------------------
def join_generation(*, lost: bool = False) -> None:
    """Wait for the next generation of an elastic job, and join it. lost: the one before broke."""
    line = lifeline.connect()
    process_exit.leave_at_once_on_failure()
    place = read_place({**os.environ, **line.join(lost=lost)})
    watch.reset()
    jax.config.update("jax_enable_recoverability", True)  # type: ignore[no-untyped-call]
    with line.changing():
        _connect(place, _Process.options)  # one rank alone, too: JAX would keep the number of the generation before
        jax.devices()  # the ranks tell each other of their devices
    _begin(place, owns_connection=True)


def leave_generation() -> None:
    """Leave a generation of an elastic job, whole or broken. All arrays on devices are gone with it."""
    joined, line = _Process.job, lifeline.connect()
    line.end_collectives()
    _Process.job = None
    with line.changing(lifeline.LEAVING_PATIENCE_S):
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
    try:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError):  # the others are gone, or the launcher's service
        private.forget_coordination_client()


def read_place(environment: Mapping[str, str]) -> Place:
    """The place that variables describe. Raises OptionError naming the variable."""

    def number(name: str, default: int) -> int:
        text = environment.get(f"SHARDWRIGHT_{name}", str(default))
        if not re.fullmatch(r"\d+", text.strip()):
            raise OptionError(f"{text!r} is no whole number", where=f"SHARDWRIGHT_{name}", remedy=_LAUNCH)
        return int(text)

    size = number("SIZE", 1)
    rank = number("RANK", 0)
    place = Place(
        coordinator=environment.get("SHARDWRIGHT_COORDINATOR", ""),
        size=size,
        rank=rank,
        local_rank=number("LOCAL_RANK", rank),
        local_size=number("LOCAL_SIZE", size),
        cross_rank=number("CROSS_RANK", 0),
        cross_size=number("CROSS_SIZE", 1),
        generation=number("GENERATION", 0),
    )
    for name in ("", "LOCAL_", "CROSS_"):
        at, count = getattr(place, f"{name.lower()}rank"), getattr(place, f"{name.lower()}size")
        if at >= count:
            where = f"SHARDWRIGHT_{name}RANK"
            raise OptionError(f"{at} is not below SHARDWRIGHT_{name}SIZE={count}", where=where, remedy=_LAUNCH)
    if size > 1 and not re.fullmatch(r".+:\d+", place.coordinator):
        raise OptionError(
            f"{place.coordinator!r} is no address host:port", where="SHARDWRIGHT_COORDINATOR", remedy=_LAUNCH
        )
    return place


_LAUNCH = "let the launcher set it: shardwright run -np 2 python train.py"


def _place_by_jax(environment: Mapping[str, str]) -> Place:
    """The place of a process in `jax.distributed` already; the launcher's variables add the host's."""
    size, rank = jax.process_count(), jax.process_index()
    named = read_place(environment)
    if (named.size, named.rank) == (size, rank):
        return named
    return replace(Place(), size=size, rank=rank, local_rank=0, local_size=1, cross_rank=rank, cross_size=size)


def _connect(place: Place, options: _Options) -> None:
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.size,
            place.rank,
            local_device_ids=_local_devices(place, os.environ),
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(options.timeout_s)),
            heartbeat_timeout_seconds=max(1, round(options.heartbeat_timeout_s)),
            coordinator_bind_address=_UNUSED_SERVICE,
        )
    except (RuntimeError, ValueError) as error:
        if "before any JAX calls" in str(error):
            raise LaunchError(
                "JAX has used its devices already",
                where="sw.ranks.init",
                remedy="call sw.ranks.init() first, before any array, jax.devices() or random key",
            ) from None
        raise LaunchError(
            f"rank {place.rank} of {place.size} cannot join the job: {error}",
            where=place.coordinator,
            remedy="see that all ranks run, and that this host reaches the launcher's address",
        ) from None


def _local_devices(place: Place, environment: Mapping[str, str]) -> list[int] | None:
    """The GPU of this rank; None: the user has chosen it, or the rank is alone on its host."""
    if "JAX_LOCAL_DEVICE_IDS" in environment or place.local_size == 1:
        return None
    for name in _DEVICE_LISTS:
        if name in environment and len(environment[name].split(",")) < place.local_size:
            return None
    return [place.local_rank]


def shutdown() -> None:
    """Leave the job, once all ranks leave it. Arrays on devices stay usable; collectives do not."""
    if _Process.job is None:
        return
    _Process.job.dispatcher.close()
    if _Process.job.inspector is not None:
        _Process.job.inspector.close()
    if _Process.job.owns_connection:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
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
