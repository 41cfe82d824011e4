"""Values of TensorFlow's variables in a session: on the servers since a step took them, here since they were read.

A variable that is assigned to here is sent with the next step. TensorFlow says nothing of an assignment, so the buffer
of a variable is looked at: it is held, and whatever assigns puts another one in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.uploads import upload

if TYPE_CHECKING:
    from shardwright.client.step_queue import StepQueue

_stores: weakref.WeakKeyDictionary[Any, VariableStore] = weakref.WeakKeyDictionary()


class _Entry:
    """One variable. handle: its value on the servers. buffer: its value here when it was last looked at.

    is_newer: the servers' value is another than the one here. is_exposed: it may have been assigned to, unseen.
    """

    __slots__ = ("buffer", "handle", "is_exposed", "is_newer", "is_watched", "variable")

    def __init__(self, variable: Any, forget: Callable[[Any], object]) -> None:
        self.variable = weakref.ref(variable, forget)
        self.handle: RemoteArray | None = None
        self.buffer: Any = None
        self.is_newer = False
        self.is_watched = False
        self.is_exposed = True


class VariableStore:
    """The variables of one session, shared by its steps."""

    def __init__(self, steps: StepQueue) -> None:
        self._steps = weakref.ref(steps)
        self._entries: dict[int, _Entry] = {}

    def take(self, variables: Sequence[Any]) -> list[RemoteArray]:
        """A handle of each variable, for a step; values that are only here are uploaded when the step needs them."""
        entries = [self._entry_of(variable) for variable in variables]
        self._notice_assignments(entries)
        missing = [entry for entry in entries if entry.handle is None]
        if missing:
            steps = self._steps()
            assert steps is not None  # one of them is running
            handles = upload(steps, [np.array(entry.buffer) for entry in missing])
            for entry, handle in zip(missing, handles, strict=True):
                entry.handle = handle
        return [entry.handle for entry in entries if entry.handle is not None]

    def put(self, variables: Sequence[Any], handles: Sequence[RemoteArray]) -> None:
        """The variables' new values, results of a step."""
        for variable, handle in zip(variables, handles, strict=True):
            entry = self._entry_of(variable)
            entry.handle, entry.is_newer = handle, True

    def bring(self, variables: Iterable[Any]) -> None:
        """Assigns the servers' values to those variables here that are older. Raises a step's error if it failed.

        Also while a graph is built, as Keras' and TensorFlow's exports do.
        """
        with tf.__internal__.eager_context.eager_mode():  # init_scope stays in a graph that is no function's
            self._bring(variables)

    def _bring(self, variables: Iterable[Any]) -> None:
        entries = [self._entries[id(variable)] for variable in variables if id(variable) in self._entries]
        self._notice_assignments([entry for entry in entries if entry.is_newer])
        newer = [(entry, entry.handle) for entry in entries if entry.is_newer and entry.handle is not None]
        for _, handle in newer:
            handle.copy_to_host_async()
        for entry, handle in newer:
            variable = entry.variable()
            if variable is not None:
                variable.assign(tf.constant(np.asarray(handle)))
                entry.buffer, entry.is_newer = variable.read_value(), False

    def watch(self, variable: Any) -> None:
        """Whoever assigns to this variable says so (`note_assigned`), or has read it from `expose`."""
        entry = self._entry_of(variable)
        entry.is_watched = True

    def expose(self, variable: Any) -> None:
        """The variable itself is handed out, with its newest value."""
        entry = self._entries.get(id(variable))
        if entry is None:
            return
        if entry.is_newer:
            self.bring((variable,))
        entry.is_exposed = True

    def note_assigned(self, variable: Any) -> None:
        """The variable has been assigned to, here."""
        entry = self._entries.get(id(variable))
        if entry is not None:
            self._take_over(entry, variable.read_value())

    def _entry_of(self, variable: Any) -> _Entry:
        key = id(variable)
        if key not in self._entries:
            entries = self._entries
            entries[key] = _Entry(variable, lambda _: entries.pop(key, None))  # with its array on the servers
        return self._entries[key]

    def _notice_assignments(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            variable = entry.variable()
            if variable is None or not entry.is_exposed:
                continue
            current = variable.read_value()
            if entry.buffer is None or _address(current) != _address(entry.buffer):
                self._take_over(entry, current)
            entry.is_exposed = not entry.is_watched

    @staticmethod
    def _take_over(entry: _Entry, value: Any) -> None:
        entry.handle, entry.buffer, entry.is_newer = None, value, False


def store_of(steps: StepQueue) -> VariableStore:
    """The variables of a session."""
    store = _stores.get(steps)
    if store is None:
        store = _stores[steps] = VariableStore(steps)
    return store


def _address(tensor: Any) -> int:
    """Where a tensor's contents lie on this machine."""
    address: int = np.asarray(tensor).__array_interface__["data"][0]
    return address
