"""Transport of array pieces between devices, on this node or elsewhere.

All values between stages go through `Transport`. A backend must keep these rules to run the task lists of
`shardwright.tasks`:

- A piece has a number that the sender and the receiver know and no other piece of the generation has. Either side may
  come first, and a number is used once.
- `send` returns at once. It keeps the array alive by itself: the caller may drop it. It may not donate it to a later
  program: whoever does sends a copy.
- `receive` returns at once; its `PendingPiece` waits until the piece is whole on the receiver's device, for as long as
  `StopSignal` allows. It must not keep a device from computing meanwhile.
- A transfer whose other side never comes costs memory, and nothing else: no wait without an end, no later number
  that is held up by it. `forget` drops what can be dropped.
- Bytes arrive as they were sent; contents are not checked.

NCCL or MPI point-to-point calls would have to be put behind queues to do this (their calls pair up in order and may
block a stream); a backend that copies through the host only needs a socket and `jax.device_put`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from shardwright.clusters.cluster import join_address
from shardwright.errors import DeadlineError, ShardwrightError
from shardwright.server.runtime.resharding import TransferPiece
from shardwright.server.tuning import FIRST_PAUSE_S, LONGEST_LOOK_S, STOP_POLL_S, TRANSFER_SOCKETS

#: A number has 63 bits: the step's sequence number, the transfer's number in the task graph, the piece's in the move.
TRANSFER_BITS, PIECE_BITS = 20, 16


def first_number(sequence: int, transfer: int) -> int:
    """Number of the first piece of a transfer, in the step with this sequence number of the master."""
    return (sequence << TRANSFER_BITS | transfer) << PIECE_BITS


class StopSignal:
    """Ends the waits of one step: an error, or too long a wait.

    wait_s: the longest time of one transfer, its sender's work included.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.error: ShardwrightError | None = None
        self._lock = threading.Lock()

    def set(self, error: ShardwrightError) -> None:
        """The first error counts."""
        with self._lock:
            self.error = self.error or error

    def check(self, since_s: float) -> None:
        """Raises the error, or DeadlineError if the wait begun at `since_s` is too long."""
        if self.error is not None:
            raise self.error
        if time.monotonic() - since_s > self.wait_s:
            raise DeadlineError(
                f"nothing came within {self.wait_s:g} s",
                remedy="another stage hangs, or the network between the workers does; see their logs",
            )


class StopSignals:
    """What ends the waits of each step; an order to stop may come before the step, and after it."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._stops: dict[int, StopSignal] = {}
        self._ended = 0  # sequence number of the last step that ended

    def of(self, sequence: int) -> StopSignal:
        with self._lock:
            return self._stops.setdefault(sequence, StopSignal(self._wait_s))

    def abort(self, sequence: int, error: ShardwrightError) -> None:
        if sequence > self._ended:
            self.of(sequence).set(error)

    def end_step(self, sequence: int) -> None:
        with self._lock:
            self._ended = sequence
            for old in [number for number in self._stops if number <= sequence]:
                del self._stops[old]


class PendingPiece(Protocol):
    """A piece on its way."""

    def wait(self, stop: StopSignal) -> jax.Array:
        """The piece on the receiver's device. Raises the error of `stop`, or of the transfer."""
        ...


class Transport(Protocol):
    """See the module's docstring. Thread-safe."""

    def send(self, number: int, array: jax.Array, target: int) -> None:
        """Hand `array`, which lies on one device, to the device at position `target`."""
        ...

    def receive(self, number: int, piece: TransferPiece, dtype: Any) -> PendingPiece:
        """Begin to take in a piece for the device `piece.target`, which is this process' own."""
        ...

    def forget(self, sequence: int) -> None:
        """Drop what is left of a step that failed."""
        ...


class LocalTransport:
    """Between devices of this process. The copy begins once both sides are there: a receiver holds no more on its
    devices than requested, however far the sender is ahead.
    """

    def __init__(self, devices: Mapping[int, jax.Device]) -> None:
        self._devices = devices
        self._changed = threading.Condition()
        self._offered: dict[int, jax.Array] = {}
        self._posted: dict[int, int] = {}  # number → position of the receiving device
        self._copied: dict[int, jax.Array] = {}

    def send(self, number: int, array: jax.Array, target: int) -> None:
        with self._changed:
            if self._posted.pop(number, None) is None:
                self._offered[number] = array
                return
            self._copied[number] = jax.device_put(array, self._devices[target])
            self._changed.notify_all()

    def receive(self, number: int, piece: TransferPiece, dtype: Any) -> PendingPiece:
        del dtype
        with self._changed:
            array = self._offered.pop(number, None)
            if array is None:
                self._posted[number] = piece.target
            else:
                self._copied[number] = jax.device_put(array, self._devices[piece.target])
        return _LocalPiece(self, number)

    def take(self, number: int, stop: StopSignal) -> jax.Array:
        since_s = time.monotonic()
        with self._changed:
            while number not in self._copied:
                stop.check(since_s)
                self._changed.wait(STOP_POLL_S)
            return self._copied.pop(number)

    def forget(self, sequence: int) -> None:
        with self._changed:
            pieces: dict[int, Any]
            for pieces in (self._offered, self._posted, self._copied):
                for number in [number for number in pieces if number >> (TRANSFER_BITS + PIECE_BITS) == sequence]:
                    del pieces[number]


class _LocalPiece:
    def __init__(self, transport: LocalTransport, number: int) -> None:
        self._transport = transport
        self._number = number

    def wait(self, stop: StopSignal) -> jax.Array:
        return self._transport.take(self._number, stop)


class RemoteTransport:
    """Between processes of the job, by `jax.experimental.transfer`: the sender offers, the receiver pulls.

    A pull that nobody answers cannot be taken back: after a step that failed it may leave its buffers behind. fetches:
    called with the bytes of each pull.
    """

    def __init__(
        self,
        server: Any,
        address_of: Callable[[int], str],
        devices: Mapping[int, jax.Device],
        fetches: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._fetches = fetches
        self._server = server
        self._address_of = address_of
        self._devices = devices
        self._lock = threading.Lock()
        self._connections: dict[str, Any] = {}

    def send(self, number: int, array: jax.Array, target: int) -> None:
        del target
        self._server.await_pull(number, [array])

    def receive(self, number: int, piece: TransferPiece, dtype: Any) -> PendingPiece:
        sharding = jax.sharding.SingleDeviceSharding(self._devices[piece.target])
        wanted = jax.ShapeDtypeStruct(piece.shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]
        (array,) = self._connection(self._address_of(piece.source)).pull(number, [wanted])
        self._fetches(array.nbytes)
        return _PulledPiece(array)

    def forget(self, sequence: int) -> None:
        del sequence

    def _connection(self, address: str) -> Any:
        with self._lock:
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            return self._connections[address]


class _PulledPiece:
    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def wait(self, stop: StopSignal) -> jax.Array:
        since_s, pause_s = time.monotonic(), FIRST_PAUSE_S
        while not self._array.is_ready():  # type: ignore[attr-defined]  # jax's stubs leave it out
            stop.check(since_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return self._array


class NodeTransport:
    """Local where both devices are this process', else remote."""

    def __init__(self, local: LocalTransport, remote: Transport | None, devices: Mapping[int, jax.Device]) -> None:
        self._local = local
        self._remote = remote
        self._devices = devices

    def send(self, number: int, array: jax.Array, target: int) -> None:
        self._between(target).send(number, array, target)

    def receive(self, number: int, piece: TransferPiece, dtype: Any) -> PendingPiece:
        return self._between(piece.source).receive(number, piece, dtype)

    def forget(self, sequence: int) -> None:
        self._local.forget(sequence)
        if self._remote is not None:
            self._remote.forget(sequence)

    def _between(self, other: int) -> Transport:
        if other in self._devices or self._remote is None:
            return self._local
        return self._remote


class Endpoint:
    """This process' end of all transfers: its devices, by position, and its address.

    host: address of its transfer server, in a job of several processes. Like XLA's own collectives, that server checks
    no token.
    """

    def __init__(self, devices: Mapping[int, jax.Device], host: str | None) -> None:
        self._devices = devices
        self._local = LocalTransport(devices)
        self._server = None if host is None else _transfer_server(host)
        self._lock = threading.Lock()
        self.fetched_bytes = 0  # from other processes

    @property
    def address(self) -> str:
        """host:port of the transfer server, or empty."""
        return "" if self._server is None else str(self._server.address())

    def transport_to(self, addresses: Mapping[int, str]) -> NodeTransport:
        """The transport among processes whose transfer servers are at `addresses`, by device position."""
        server = self._server
        remote = None
        if server is not None:
            remote = RemoteTransport(server, addresses.__getitem__, self._devices, self._count)
        return NodeTransport(self._local, remote, self._devices)

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self.fetched_bytes += size_bytes


def _transfer_server(host: str) -> Any:
    from jax.experimental import transfer

    address = join_address(host, 0)
    client = jax.local_devices()[0].client
    return transfer.start_transfer_server(client, address, [address] * TRANSFER_SOCKETS)
