"""Transfers inside a process: who waits for whom, and what is copied when."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

from shardwright.errors import DeadlineError, WorkerLostError
from shardwright.server.runtime.arrays import local_positions
from shardwright.server.runtime.resharding import TransferPiece
from shardwright.server.runtime.transport import Endpoint, LocalTransport, StopSignal, StopSignals, first_number

PIECE = TransferPiece(number=0, section=0, source=0, target=1, cut=None, shape=(4,))


def array(value: float) -> jax.Array:
    return jax.device_put(np.full(4, value, np.float32), local_positions()[0])


@pytest.mark.parametrize("sender_is_first", [True, False])
def test_either_side_may_come_first(sender_is_first: bool) -> None:
    transport = Endpoint(local_positions(), None).transport_to({})
    if sender_is_first:
        transport.send(7, array(3.0), 1)
    arrival = transport.receive(7, PIECE, np.float32)
    if not sender_is_first:
        threading.Timer(0.05, lambda: transport.send(7, array(3.0), 1)).start()
    result = arrival.wait(StopSignal(10.0))
    assert result.devices() == {local_positions()[1]}
    np.testing.assert_array_equal(result, np.full(4, 3.0))


def test_nothing_lies_on_the_receiver_before_it_asks() -> None:
    transport = LocalTransport(local_positions())
    for number in range(5):
        transport.send(number, array(number), 1)
    held = [each for each in jax.live_arrays() if each.shape == (4,) and each.devices() == {local_positions()[1]}]
    transport.receive(3, PIECE, np.float32)
    now = [each for each in jax.live_arrays() if each.shape == (4,) and each.devices() == {local_positions()[1]}]
    assert len(now) == len(held) + 1


def test_waits_end_by_an_error_or_by_their_deadline() -> None:
    transport = LocalTransport(local_positions())
    arrival = transport.receive(first_number(5, 0), PIECE, np.float32)
    with pytest.raises(DeadlineError, match=r"nothing came within 0\.1 s"):
        arrival.wait(StopSignal(0.1))
    stop, lost = StopSignal(10.0), WorkerLostError("gone")
    threading.Timer(0.05, lambda: stop.set(lost)).start()
    with pytest.raises(WorkerLostError, match="gone"):
        arrival.wait(stop)
    transport.forget(5)
    transport.send(first_number(5, 0), array(1.0), 1)  # to nobody: what was asked for is forgotten
    with pytest.raises(DeadlineError):
        arrival.wait(StopSignal(0.1))


def test_an_order_to_stop_may_come_before_its_step_and_after() -> None:
    stops = StopSignals(10.0)
    lost = WorkerLostError("gone")
    stops.abort(3, lost)
    assert stops.of(3).error is lost
    assert stops.of(4).error is None
    stops.end_step(4)
    stops.abort(4, lost)
    assert stops.of(5).error is None
