"""Arrays that a later program takes over while somebody waits for them, or reads them: that is no failure."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import pytest

from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.server.runtime.arrays import StoredArray, sharding_of, wait_until_computed, whole_to_host

LAYOUT = Layout(
    element_type="f32",
    shape=(64,),
    mesh=Mesh.of({"data": 8}),
    sharding=TensorSharding(dims=(("data",),)),
    stored_shape=(64,),
)
#: How long one thread donates what another one looks at.
RACE_S = 3.0


@pytest.fixture
def quick_switches() -> Iterator[None]:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def test_an_array_that_is_donated_meanwhile_was_computed(quick_switches: None) -> None:
    update = jax.jit(lambda value: value * 1.0001, donate_argnums=0, out_shardings=sharding_of(LAYOUT))
    waiting: SimpleQueue[StoredArray | None] = SimpleQueue()
    unexplained: list[Exception] = []

    def look() -> None:
        while (stored := waiting.get()) is not None:
            for wait in (wait_until_computed, whole_to_host):
                try:
                    wait(stored)
                except Exception as caught:
                    if wait is wait_until_computed or not stored.explains(caught):
                        unexplained.append(caught)

    observer = threading.Thread(target=look)
    observer.start()
    stored = StoredArray(value=jax.device_put(jnp.zeros(64), sharding_of(LAYOUT)), layout=LAYOUT)
    end_s = time.monotonic() + RACE_S
    while time.monotonic() < end_s:
        waiting.put(stored)
        stored.is_donated = True
        stored = StoredArray(value=update(stored.value), layout=LAYOUT)
    waiting.put(None)
    observer.join()
    assert not unexplained


def test_an_error_of_another_kind_stays_an_error() -> None:
    stored = StoredArray(value=jax.device_put(jnp.zeros(64), sharding_of(LAYOUT)), layout=LAYOUT, is_donated=True)
    assert not stored.explains(RuntimeError("INTERNAL: the link is down"))
    stored.is_donated = False
    assert not stored.explains(RuntimeError("Array has been deleted"))
