"""The user's handles of a session, and the names of their arrays: a recovery on other nodes looks for both."""

from __future__ import annotations

import weakref

from shardwright.client.arrays import RemoteArray
from shardwright.client.calls import KnownArray, Name
from shardwright.client.connection import MasterConnection
from shardwright.client.stream import StepStream


class Handles:
    """Of one session; it holds none of them. Only a cluster whose nodes come and go needs them."""

    def __init__(self, master: MasterConnection, stream: StepStream) -> None:
        self._master = master
        self._stream = stream
        self._handles: weakref.WeakValueDictionary[int, RemoteArray] = weakref.WeakValueDictionary()

    def add(self, handle: RemoteArray) -> None:
        """A handle has got these ids."""
        if self._master.info.is_elastic:
            self._handles[handle._ids[0]] = handle

    def list_placed(self) -> list[RemoteArray]:
        """Those of arrays on the servers."""
        handles = [reference() for reference in self._handles.valuerefs()]
        return [
            handle
            for handle in handles
            if handle is not None and handle._ids and not handle._deleted and handle._place is not None
        ]

    def identify(self, handle: RemoteArray) -> KnownArray:
        """A handle's array, for a recovery on other nodes."""
        assert handle._place is not None
        return KnownArray(name=self.name_of(handle._ids), spec=handle.spec, ids=handle._ids, place=handle._place)

    def identify_all(self) -> dict[int, KnownArray]:
        """All arrays that have handles, by the first ids of their names."""
        if not self._master.info.is_elastic:
            return {}
        arrays = [self.identify(handle) for handle in self.list_placed()]
        return {array.name[0]: array for array in arrays}

    def name_of(self, ids: tuple[int, ...]) -> Name:
        return self._stream.journal.names.get(ids[0], ids) if ids else ()

    def rename(self, names: dict[int, Name]) -> None:
        """The names of all arrays that are known by another one than their ids."""
        with self._stream.changed:
            self._stream.journal.names = names
