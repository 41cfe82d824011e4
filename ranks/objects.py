"""Python objects between ranks, without pickle: nothing that arrives can run code (`shardwright/object_codec.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.object_codec import dumps, loads
from shardwright.ranks import messages
from shardwright.ranks.agreement import describe
from shardwright.ranks.collectives import report_to_all, root_place, run_on
from shardwright.ranks.process_sets import ProcessSet


def broadcast_object(obj: Any, root_rank: int = 0, *, name: str = "", process_set: ProcessSet | None = None) -> Any:
    """The object of rank `root_rank`, at every rank; what the others pass is not looked at.

    Numbers, text, bytes, None, numpy and JAX arrays, and lists, tuples, sets and dicts of them, each type as it was
    (arrays arrive as numpy's). Raises ObjectTypeError with the path of anything else, at all ranks CollectiveError.
    """

    def task(members: ProcessSet) -> Any:
        with report_to_all(members):
            root = root_place(members, root_rank)
            message = _as_bytes(obj) if members.rank() == root else None
        call = describe(f"broadcast_object from {root_rank}", name, [])
        return loads(messages.broadcast(members, call, message, root).tobytes())

    return run_on(process_set, task)


def allgather_object(obj: Any, *, name: str = "", process_set: ProcessSet | None = None) -> list[Any]:
    """The objects of all ranks, in order; those with data left, where some have joined. Types as `broadcast_object`."""

    def task(members: ProcessSet) -> list[Any]:
        with report_to_all(members):
            message = _as_bytes(obj)
        received, agreement = messages.gather(members, describe("allgather_object", name, []), message)
        return [loads(received[place].tobytes()) for place in agreement.active_places()]

    return run_on(process_set, task)


def _as_bytes(obj: Any) -> np.ndarray:
    return np.frombuffer(dumps(obj), np.uint8)
