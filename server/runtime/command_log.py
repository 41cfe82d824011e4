"""An executor's commands and answers: a restarted master asks for them.

All executors get the same commands in the same order. A master that dies in the middle of a broadcast leaves logs of
unequal lengths; the longest then serves the others.
"""

from __future__ import annotations

import threading
from collections import deque

from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.server.tuning import KEPT_STEPS


class CommandLog:
    """Thread-safe. received: sequence number of the last command."""

    def __init__(self) -> None:
        self.received = 0
        self._lock = threading.Lock()
        self._commands: deque[worker_pb2.ExecutorCommand] = deque()
        self._running: dict[int, tuple[str, worker_pb2.StepRecord]] = {}  # by sequence number
        self._steps: dict[str, dict[int, worker_pb2.StepRecord]] = {}  # by session and step number
        self._kept: dict[str, master_pb2.KeptState] = {}

    def take(self, command: worker_pb2.ExecutorCommand) -> None:
        """A command came."""
        if not command.sequence:
            return
        with self._lock:
            self.received = command.sequence
            while self._commands and self._commands[0].sequence <= command.known:
                self._commands.popleft()
            self._commands.append(command)
            if command.HasField("run"):
                self._note_step(command.sequence, command.run.step)
            elif command.HasField("close"):
                self._steps.pop(command.close.session_id, None)
                self._kept.pop(command.close.session_id, None)

    def _note_step(self, sequence: int, step: master_pb2.RunStepsRequest) -> None:
        record = worker_pb2.StepRecord(
            number=step.number, is_save=step.HasField("save"), is_snapshot=step.HasField("snapshot")
        )
        if step.HasField("kept"):
            kept = self._kept.setdefault(step.session_id, master_pb2.KeptState())
            description = step.kept.description or kept.description
            kept.CopyFrom(step.kept)
            kept.description = description
        if record.is_snapshot and step.session_id in self._kept:
            record.kept.CopyFrom(self._kept[step.session_id])
        self._running[sequence] = step.session_id, record

    def finish(self, done: worker_pb2.CommandDone) -> None:
        """A command was carried out."""
        with self._lock:
            session_id, record = self._running.pop(done.sequence, ("", None))
            if record is None:
                return
            record.done.CopyFrom(done)
            steps = self._steps.setdefault(session_id, {})
            steps[record.number] = record
            while len(steps) > KEPT_STEPS:
                del steps[min(steps)]

    def recent(self, after: int) -> worker_pb2.RecentCommands:
        """The commands after one, unless all executors are known to have them."""
        with self._lock:
            return worker_pb2.RecentCommands(commands=[each for each in self._commands if each.sequence > after])

    def complete(self, report: worker_pb2.ExecutorReport) -> None:
        """Add to each session its steps, and what is kept."""
        with self._lock:
            for session in report.sessions:
                session.steps.extend(self._steps.get(session.session_id, {}).values())
                kept = self._kept.get(session.session_id)
                if kept is not None:
                    session.kept.CopyFrom(kept)
