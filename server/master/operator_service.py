"""The master's gRPC service for operators: lines of all logs from one place, and the end of steps."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from shardwright.clusters.access_tokens import Caller
from shardwright.errors import OptionError, ShardwrightError
from shardwright.log_lines import LEVELS, SESSION_DIGITS, fields
from shardwright.proto.v1 import operators_pb2, operators_pb2_grpc
from shardwright.protocol import log_messages
from shardwright.server.access import Access
from shardwright.server.handlers import abort_aio
from shardwright.server.log_store import Query
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.cancels import session_of
from shardwright.server.master.sessions import unknown_session
from shardwright.server.master.shell import Master
from shardwright.server.master.state import MasterState
from shardwright.server.tuning import FOLLOW_S, MOST_LINES_FOLLOWED

_log = logging.getLogger("shardwright.server")


class OperatorService(operators_pb2_grpc.OperatorsServicer):
    """access: knows who calls; that it is an operator, the interceptor has checked."""

    def __init__(self, master: Master, access: Access) -> None:
        self._master = master
        self._access = access
        self._logs = master.logs

    async def EndSteps(self, request: operators_pb2.EndStepsRequest, context: Any) -> operators_pb2.EndStepsReply:
        caller = self._access.caller(context.invocation_metadata())
        operator = operator_of(caller)
        try:
            session_id = find_session_id(self._master.state, request.session)
            which = f"step {request.number}" if request.number else "all steps"
            about_it = fields(session=session_id, step=request.number)
            _log.warning("%s of session %s: ended by %s", which, session_id[:SESSION_DIGITS], operator, extra=about_it)
            call = self._master.call(
                lambda call: ev.StepsEnded(call=call, session_id=session_id, number=request.number, operator=operator)
            )
            done: do.Cancellation = await call.answer()
        except ShardwrightError as error:
            await abort_aio(context, error)
        session = self._master.state.sessions.get(session_id)
        return operators_pb2.EndStepsReply(
            session_id=session_id[:SESSION_DIGITS],
            owner=session.owner if session is not None else "",
            cancelled=done.cancelled,
            running=done.running,
        )

    async def ReadLogs(self, request: operators_pb2.ReadLogsRequest, context: Any) -> None:
        if request.level and request.level not in LEVELS:
            error = OptionError(f"{request.level!r} is no level", where="level", remedy=f"one of {', '.join(LEVELS)}")
            await abort_aio(context, error)
        query = Query(
            node=request.node if request.HasField("node") else None,
            session=request.session,
            level=request.level or LEVELS[0],
        )
        lines, _ = self._logs.after(0, query)
        seen, has_gap = self._logs.last, False  # lines of long ago are gone always
        lines = lines[-request.tail :] if request.tail else lines
        while True:
            for start in range(0, len(lines), MOST_LINES_FOLLOWED):
                messages = [log_messages.to_proto(line) for line in lines[start : start + MOST_LINES_FOLLOWED]]
                await context.write(operators_pb2.ReadLogsReply(lines=messages, has_gap=has_gap))
                has_gap = False
            if not request.follow:
                return
            await asyncio.sleep(FOLLOW_S)
            lines, is_late = self._logs.after(seen, query)
            seen, has_gap = self._logs.last, has_gap or is_late


def operator_of(caller: Caller | None) -> str:
    """An operator, in words."""
    return f"the operator {caller.name}" if caller is not None and caller.name else "an operator"


def find_session_id(state: MasterState, digits: str) -> str:
    """The one session whose id begins so; one that is closed counts while a command of it runs.

    Raises OptionError where there are several, SessionError where there is none.
    """
    ids = {*state.sessions, *(session_of(item.command) for item in state.pending.values())}
    matches = [session_id for session_id in ids if digits and session_id.startswith(digits)]
    if len(matches) > 1:
        raise OptionError(
            f"{len(matches)} sessions begin with {digits[:SESSION_DIGITS]}", where="session", remedy="give more digits"
        )
    if not matches:
        raise unknown_session(digits)
    return matches[0]
