"""Where the processes of a job meet before they connect: who waits knows for whom, and may give up.

`jax.distributed.initialize` waits in XLA, cannot say for whom, and ends the process where somebody never comes. So all
ranks meet first, in the launcher or at rank 0, and connect once all are there. One JSON object a line over TCP. A rank
says

    {"job": "slurm 12.0", "size": 4, "rank": 2, "round": 1, "host": "node7 4f0c91…"}

and hears, where it has to wait, who is missing, and at last where the coordination service is:

    {"missing": [3], "waiting": [0, 1], "gone": [2]}
    {"coordinator": "10.0.0.1:40321", "hosts": [0, 0, 1, 1]}
    {"error": "another process is rank 2 already"}

Each round has a service of its own: keys of the one before would be in the way.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from shardwright.clusters.cluster import join_address
from shardwright.errors import LaunchError
from shardwright.launch.service import CoordinationService
from shardwright.launch.tuning import (
    CONNECT_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    MEETING_LINE_BYTES,
    MOST_NAMES,
    TELL_INTERVAL_S,
    TICK_S,
)


@dataclass(frozen=True, slots=True)
class Absence:
    """For whom ranks wait, who waits, and who had waited and has gone: the first of them."""

    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    gone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a rank says of itself.

    job: names the job, where its launcher does. round: 1, and one more after each `shutdown`. host: names its machine.
    """

    job: str
    size: int
    rank: int
    round: int
    host: str


def _read_arrival(line: bytes) -> Arrival | None:
    """The arrival in a line; None for anything else."""
    try:
        arrival = Arrival(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = (arrival.size, arrival.rank, arrival.round)
    texts = (arrival.job, arrival.host)
    is_valid = all(type(number) is int for number in numbers) and all(type(text) is str for text in texts)
    return arrival if is_valid else None


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


# ---- the place -------------------------------------------------------------------
class MeetingPoint:
    """Waits for `size` ranks, again for each round, and tells them the round's coordination service.

    host: an address of this machine that the ranks reach. port: 0 for a free one. job: as in `Arrival`. listen: the
    address of the sockets, where that is another; "0.0.0.0" for all. first: the service of the first round, whose owner
    closes it. address: `host:port` for the ranks. Raises LaunchError.
    """

    def __init__(
        self,
        host: str,
        size: int,
        port: int = 0,
        *,
        job: str = "",
        listen: str = "",
        first: CoordinationService | None = None,
    ) -> None:
        self._host, self._listen, self._size, self._job = host, listen, size, job
        self._first = first
        self._service: CoordinationService | None = None
        self._round = 1
        self._waiting: dict[int, tuple[socket.socket, Arrival]] = {}
        self._gone: set[int] = set()  # ranks that came in this round, and gave up
        self._lock = threading.Lock()
        self._is_closed = False
        self._listener = _listen(listen or host, port)
        self.address = join_address(host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    def close(self) -> None:
        """End it, and the services that it has made."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._service is not None:
            self._service.close()

    def __enter__(self) -> MeetingPoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # too many files, say
                if self._is_closed:
                    return
                time.sleep(TICK_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="meeting", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(HELLO_TIMEOUT_S)
            arrival = _read_arrival(connection.makefile("rb").readline(MEETING_LINE_BYTES))
            if arrival is None:
                return
            if problem := self._admit(arrival, connection):
                connection.sendall(_encode({"error": problem}))
                return
            try:
                self._keep_telling(connection)
            finally:
                self._forget(arrival.rank, connection)

    def _keep_telling(self, connection: socket.socket) -> None:
        """Tell a rank for whom it waits, until it goes."""
        connection.settimeout(TELL_INTERVAL_S)
        latest: dict[str, Any] = {}
        while True:
            with self._lock:
                if self._waiting and (absence := self._describe_absence()) != latest:
                    connection.sendall(_encode(absence))
                    latest = absence
            with contextlib.suppress(TimeoutError):
                if not connection.recv(MEETING_LINE_BYTES):
                    return

    def _admit(self, arrival: Arrival, connection: socket.socket) -> str:
        """Let a rank in; once all are there, let them go. What is wrong with it, or ""."""
        with self._lock:
            if problem := self._find_problem(arrival):
                return problem
            self._waiting[arrival.rank] = connection, arrival
            self._gone.discard(arrival.rank)
            if len(self._waiting) < self._size:
                return ""
            try:
                answer: dict[str, Any] = {"coordinator": self._open_service(), "hosts": self._number_hosts()}
                self._round += 1
            except LaunchError as error:
                answer = {"error": error.message}
            for other, _ in self._waiting.values():
                with contextlib.suppress(OSError):
                    other.sendall(_encode(answer))
            self._waiting.clear()
            return ""

    def _number_hosts(self) -> list[int]:
        """The number of each rank's host."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault(self._waiting[rank][1].host, len(numbers)) for rank in range(self._size)]

    def _find_problem(self, arrival: Arrival) -> str:
        if arrival.job != self._job:
            return f"it is of the job {arrival.job!r}, those who meet there are of {self._job!r}"
        if arrival.size != self._size:
            return f"it says that there are {arrival.size} ranks, rank 0 says {self._size}"
        if not 0 <= arrival.rank < self._size:
            return f"there is no rank {arrival.rank} of {self._size}"
        if arrival.round != self._round:
            return f"it joins for time {arrival.round}, the others for time {self._round}: has it been started again?"
        if arrival.rank in self._waiting:
            return f"another process is rank {arrival.rank} already, on {self._waiting[arrival.rank][1].host}"
        return ""

    def _open_service(self) -> str:
        """A service that nobody has asked yet."""
        if self._round == 1 and self._first is not None:
            return self._first.address
        old = self._service
        self._service = CoordinationService(self._host, self._size, listen=self._listen)
        if old is not None:
            old.close()  # all ranks have left it
        return self._service.address

    def _forget(self, rank: int, connection: socket.socket) -> None:
        with self._lock:
            if self._waiting.get(rank, (None,))[0] is connection:
                del self._waiting[rank]
                self._gone.add(rank)

    def _describe_absence(self) -> dict[str, Any]:
        missing = [rank for rank in range(self._size) if rank not in self._waiting and rank not in self._gone]
        ranks = {"missing": missing, "waiting": sorted(self._waiting), "gone": sorted(self._gone)}
        return {kind: numbers[:MOST_NAMES] for kind, numbers in ranks.items()}


def _listen(host: str, port: int) -> socket.socket:
    try:
        if host == "0.0.0.0" and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family)
    except OSError as error:
        raise LaunchError(
            f"the ranks cannot meet at this port ({error.strerror or error})",
            where=join_address(host, port),
            remedy="name another address of this machine: --coordinator-address of `shardwright run`, "
            "SHARDWRIGHT_COORDINATOR under another launcher",
        ) from None


# ---- a rank ----------------------------------------------------------------------
def meet(
    address: str, arrival: Arrival, on_wait: Callable[[Absence | str, float], None]
) -> tuple[str, tuple[int, ...]]:
    """Wait at `address` for the other ranks: the coordination service, and the number of each rank's host.

    on_wait: called several times a second with who is missing, or why nobody answers there, and the seconds since the
    start; what it raises ends the wait. Raises LaunchError where this rank is refused.
    """
    start_s = time.monotonic()
    while True:
        problem = "no answer"
        try:
            if answer := _ask(address, arrival, lambda absence: on_wait(absence, time.monotonic() - start_s)):
                return answer
        except OSError as error:
            problem = error.strerror or str(error)
        on_wait(problem, time.monotonic() - start_s)
        time.sleep(TICK_S)


def _ask(
    address: str, arrival: Arrival, on_wait: Callable[[Absence | str], None]
) -> tuple[str, tuple[int, ...]] | None:
    """One visit; None where the other side ends it. Raises OSError where nobody is there."""
    host, _, port = address.rpartition(":")
    absence: Absence | str = "no answer"
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
        connection.settimeout(TICK_S)
        connection.sendall(_encode(asdict(arrival)))
        for message in _read_messages(connection, address):
            if "coordinator" in message:
                return str(message["coordinator"]), tuple(map(int, message["hosts"]))
            if "error" in message:
                raise LaunchError(
                    f"rank {arrival.rank} of {arrival.size} cannot join: {message['error']}",
                    where=address,
                    remedy="see that each process of the job, and no other, has this address and a rank of its own",
                )
            if "missing" in message:
                absence = Absence(*(tuple(message.get(kind, ())) for kind in ("missing", "waiting", "gone")))
            on_wait(absence)
    return None


def _read_messages(connection: socket.socket, address: str) -> Iterator[dict[str, Any]]:
    """What is said, and an empty message at each tick of silence, until the other side closes."""
    buffer = b""
    while True:
        try:
            data = connection.recv(1 << 16)
        except TimeoutError:
            yield {}
            continue
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError
            except ValueError:
                raise LaunchError(
                    "what answers there is no meeting point of ranks",
                    where=address,
                    remedy="name a free port of rank 0's host: SHARDWRIGHT_COORDINATOR=host:port",
                ) from None
            yield message
