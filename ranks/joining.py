"""How a process gets into its job: it meets the other ranks, and all connect at once."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import jax

from shardwright.clusters.cluster import is_loopback
from shardwright.errors import LaunchError
from shardwright.launch.meeting import Absence, Arrival, MeetingPoint, meet
from shardwright.ranks import stall
from shardwright.ranks.places import Place, name_host
from shardwright.ranks.tuning import DEFAULT_WARNING_S
from shardwright.xla import private

#: Rank 0's `jax.distributed.initialize` starts a service in any case; the one that ranks met for is the one they ask.
_UNUSED_SERVICE = "127.0.0.1:0"
_DEVICE_LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")

_DEPARTURES = "shardwright/departures/"

_log = logging.getLogger("shardwright.ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The times of `init`, in seconds."""

    timeout_s: float = 300.0
    heartbeat_timeout_s: float = 100.0
    stall_warning_s: float = DEFAULT_WARNING_S
    stall_shutdown_s: float = 0.0


class _Process:
    """How often this process has joined a job, and where it waits for others as rank 0, by address."""

    rounds = 0
    meetings: ClassVar[dict[str, MeetingPoint]] = {}


def meet_others(place: Place, options: JoinOptions) -> Place:
    """Wait until all ranks have called `init`: the place with its coordinator and its neighbors.

    Raises LaunchError with the ranks that are missing.
    """
    address = place.meeting or place.coordinator
    if not place.meeting and place.rank == 0:
        address = _host_meeting(place)
    arrival = Arrival(job=place.job, size=place.size, rank=place.rank, round=_Process.rounds + 1, host=name_host())
    coordinator, hosts = meet(address, arrival, _Patience(place, options, address).check)
    _Process.rounds += 1
    whole = replace(place, coordinator=coordinator)
    return whole if place.has_neighbors else whole.among(hosts)


def _host_meeting(place: Place) -> str:
    """Let the others meet at rank 0; the address, for itself. Raises LaunchError."""
    host, _, port = place.coordinator.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"rank 0 does not know the host {host}, at which the others would look for it ({error.strerror or error})",
            where=place.coordinator,
            remedy="name rank 0's host by SHARDWRIGHT_COORDINATOR=host:port; where this is a job of its own, set "
            "SHARDWRIGHT_SIZE=1",
        ) from None
    listen = "" if is_loopback(host.strip("[]")) else "0.0.0.0"
    if place.coordinator not in _Process.meetings:
        _Process.meetings[place.coordinator] = MeetingPoint(
            host.strip("[]"), place.size, int(port), job=place.job, listen=listen
        )
    return f"127.0.0.1:{port}" if listen else place.coordinator


class _Patience:
    """Says for whom `init` waits, and ends the wait."""

    def __init__(self, place: Place, options: JoinOptions, address: str) -> None:
        self._place, self._address = place, address
        self._warning_s = options.stall_warning_s
        self._next_s = options.stall_warning_s
        limits = (options.timeout_s, options.stall_shutdown_s)
        self._limit_s = min([limit for limit in limits if limit > 0], default=float("inf"))

    def check(self, absence: Absence | str, waited_s: float) -> None:
        """Warn at each interval; raise LaunchError at the limit."""
        is_over = waited_s >= self._limit_s
        is_late = self._warning_s > 0 and waited_s >= self._next_s
        if not (is_over or is_late):
            return
        text = self._describe(absence, waited_s)
        if is_over:
            raise LaunchError(
                text,
                where="sw.ranks.init",
                remedy="every rank of the job must call it; allow more with init(timeout_s=…) and --stall-shutdown",
            )
        self._next_s = waited_s + self._warning_s
        if isinstance(absence, str) or self._place.rank == absence.waiting[0]:
            _log.warning(text)

    def _describe(self, absence: Absence | str, waited_s: float) -> str:
        if isinstance(absence, Absence):
            gone = f"{stall.name_ranks(absence.gone)} had called it, and left" if absence.gone else ""
            if not absence.missing:
                return f"{stall.name_ranks(absence.waiting)} waited in sw.ranks.init for {waited_s:.0f} s; {gone}"
            text = stall.describe_wait("sw.ranks.init", absence.missing, absence.waiting, waited_s)
            return f"{text}; {gone}" if gone else text
        who = "the launcher" if self._place.meeting else "rank 0"
        return (
            f"{who} does not answer at {self._address} ({absence}): rank {self._place.rank} of {self._place.size} "
            f"has waited in sw.ranks.init for {waited_s:.0f} s"
        )


def wait_for_departures(place: Place) -> None:
    """Wait until all ranks leave, for as long as they take: after five minutes jaxlib would end the first to come."""
    client, pause_s = private.coordination_client(), 0.01
    if client is None:
        return
    with contextlib.suppress(RuntimeError, ValueError):  # the others are gone, or the service
        client.key_value_set(f"{_DEPARTURES}{place.rank}", "", True)
        while len(client.key_value_dir_get(_DEPARTURES)) < place.size:
            time.sleep(pause_s)
            pause_s = min(max(1.0, place.size / 500), 1.5 * pause_s)


def check_unused_devices() -> None:
    """Raises LaunchError where JAX has devices already, which are of this process alone."""
    if private.has_devices():
        raise LaunchError(
            "JAX has used its devices already",
            where="sw.ranks.init",
            remedy="call sw.ranks.init() first, before any array, jax.devices() or random key",
        )


def open_devices(place: Place) -> None:
    """Have all ranks tell each other of their devices: later, a rank that is busy would hold up the others' sets.

    Raises LaunchError.
    """
    try:
        jax.devices()
    except RuntimeError as error:
        raise LaunchError(
            f"rank {place.rank} of {place.size} has no devices: {str(error).strip().splitlines()[0]}",
            where="sw.ranks.init",
            remedy="look at the other ranks' output: the first that failed is the cause",
        ) from error


def connect(place: Place, options: JoinOptions, environment: Mapping[str, str]) -> None:
    """Join `jax.distributed`. Raises LaunchError."""
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.size,
            place.rank,
            local_device_ids=_local_devices(place, environment),
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(options.timeout_s)),
            heartbeat_timeout_seconds=max(1, round(options.heartbeat_timeout_s)),
            coordinator_bind_address=_UNUSED_SERVICE,
        )
    except (RuntimeError, ValueError) as error:
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
