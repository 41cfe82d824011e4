"""Calls that begin again where the cluster's nodes change meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from shardwright.client.cluster_view import ClusterView
from shardwright.client.limits import CHANGE_PAUSE_S
from shardwright.client.recovery import Recovery
from shardwright.client.stream import InterruptedByRecoveryError, StepStream
from shardwright.errors import ClusterChangedError

T = TypeVar("T")


class SteadyCalls:
    """Of one session. lock: is held while a step is numbered and sent."""

    def __init__(self, cluster: ClusterView, stream: StepStream, recovery: Recovery, lock: threading.RLock) -> None:
        self._cluster = cluster
        self._stream = stream
        self._recovery = recovery
        self._lock = lock
        self._followed_losses, self._is_outdated = 0, False

    def run(self, act: Callable[[], T]) -> T:
        """The result of `act`, which begins again where the nodes change meanwhile; then it must have sent nothing."""
        if not self._cluster.info.is_elastic or self._stream.replayer == threading.get_ident():
            return act()
        while True:
            self._recovery.wait_until_over()
            self._follow_nodes()
            try:
                return act()
            except InterruptedByRecoveryError:
                continue
            except ClusterChangedError:
                self._is_outdated = True
                time.sleep(CHANGE_PAUSE_S)

    def _follow_nodes(self) -> None:
        """After a loss that the session does not survive: find out which nodes there are now."""
        lost = self._stream.lost_generations
        if self._recovery.is_on or (lost == self._followed_losses and not self._is_outdated):
            return
        self.raise_earlier_error()
        self._cluster.take_nodes(self._recovery.await_ready("")[1])
        self._followed_losses, self._is_outdated = lost, False

    def raise_earlier_error(self) -> None:
        """Raises an earlier step's error that was not raised before."""
        with self._lock:
            self._cluster.require_open()
            error = self._stream.take_error()
            if error is not None:
                raise error
