"""Figures of an executor, for its signs of life: memory of its devices and its process, bytes that it moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import psutil

from shardwright.proto.v1 import operators_pb2
from shardwright.server.runtime.arrays import ArrayStore, local_positions
from shardwright.server.runtime.transfer_service import TransferService


class ExecutorGauge:
    """fetched_bytes: those that came from other executors so far."""

    def __init__(self, store: ArrayStore, transfer: TransferService, fetched_bytes: Callable[[], int]) -> None:
        self._store = store
        self._transfer = transfer
        self._fetched_bytes = fetched_bytes
        self._process = psutil.Process()

    def read(self) -> operators_pb2.ExecutorFigures:
        return operators_pb2.ExecutorFigures(
            devices=self._devices(),
            resident_bytes=self._process.memory_info().rss,
            received_bytes=self._transfer.received_bytes,
            sent_bytes=self._transfer.sent_bytes,
            fetched_bytes=self._fetched_bytes(),
        )

    def _devices(self) -> list[operators_pb2.DeviceFigures]:
        """As the platform tells; XLA:CPU does not, there it is what the sessions' arrays take."""
        devices, held = local_positions(), None
        figures = []
        for position, device in devices.items():
            stats = device.memory_stats() or {}
            if "bytes_in_use" not in stats:
                held = held or _held_bytes(self._store)
            used = stats.get("bytes_in_use", 0) if held is None else held[position]
            figures.append(
                operators_pb2.DeviceFigures(
                    position=position,
                    used_bytes=used,
                    limit_bytes=stats.get("bytes_limit", 0),
                    peak_bytes=stats.get("peak_bytes_in_use", 0),
                )
            )
        return figures


def _held_bytes(store: ArrayStore) -> Counter[int]:
    """What arrays take on each device of this process, by position."""
    held: Counter[int] = Counter()
    for stored in store.all_arrays():
        if not stored.is_donated:
            for position in stored.layout.devices:
                held[position] += stored.layout.shard_bytes
    return held
