"""Calls in an outage: they are repeated while the server keeps the session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from shardwright.client.limits import RETRY_PAUSE_S
from shardwright.errors import ServerDrainingError, ServerUnavailableError, SessionError, ShardwrightError

T = TypeVar("T")


class OutageError(ServerUnavailableError):
    """A call that did not reach the server, or lost its reply: it may be made again."""

    is_explained = False  # whether it says what is wrong, and what to do


def is_outage(error: grpc.RpcError) -> bool:
    """Whether the call failed on its way, whatever the server would have said."""
    code = error.code()
    if code is grpc.StatusCode.UNKNOWN:
        return "Stream removed" in (error.details() or "")
    return code is grpc.StatusCode.UNAVAILABLE


class Retries:
    """How often the calls of one session are made again.

    grace_s: how long the server keeps a session without a connection. is_gone: whether the server has ended for good.
    """

    def __init__(self, is_gone: Callable[[], bool]) -> None:
        self.grace_s = 0.0  # until the session is open
        self._is_gone = is_gone
        self._closed = threading.Event()

    def close(self) -> None:
        """Nothing is tried again, and what fails from now on fails because of this."""
        self._closed.set()

    def check_open(self) -> None:
        """Raises SessionError once the session is closed."""
        if self._closed.is_set():
            raise SessionError("the session was closed", remedy="open a new one with connect()")

    def call(self, attempt: Callable[[int], T]) -> T:
        """`attempt(number)`, again after each OutageError, numbered from 0.

        Raises ServerUnavailableError when the outage takes longer than the server's grace, SessionError once the
        session is closed.
        """
        began_s, number = time.monotonic(), 0
        while True:
            try:
                return attempt(number)
            except OutageError as error:
                self.check_open()
                out_s = time.monotonic() - began_s
                if self._is_gone() or out_s + RETRY_PAUSE_S > self.grace_s:
                    raise self._final(error, out_s) from None
            number += 1
            self._closed.wait(RETRY_PAUSE_S)

    def _final(self, error: OutageError, out_s: float) -> ServerUnavailableError:
        if error.is_explained or not self.grace_s:
            return ServerUnavailableError(error.message, where=error.where, remedy=error.remedy)
        return describe_outage(out_s, self.grace_s, error)


def describe_outage(out_s: float, grace_s: float, error: ShardwrightError) -> ServerUnavailableError:
    """The error of an outage that took `out_s`, longer than the server keeps a session."""
    return ServerUnavailableError(
        f"the server could not be reached for {out_s:.0f} s; it keeps a session for {grace_s:g} s: {error.message}",
        where=error.where,
        remedy="connect again (shardwright.connect) once it is back, and restore a checkpoint",
    )


def to_outage(error: ShardwrightError) -> ShardwrightError:
    """The error of a failed call as one after which it may be made again; a server that drains has answered."""
    if isinstance(error, ServerDrainingError) or not isinstance(error, ServerUnavailableError):
        return error
    return OutageError(error.message, where=error.where, remedy=error.remedy)
