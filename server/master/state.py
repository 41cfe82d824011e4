"""The master as a pure state machine: `MasterState.handle(event, now_s) -> commands`.

No clock, no network, no randomness: the shell (`shell.py`) brings events and
carries out commands. `formation.py` decides which executors run, `sessions.py`
books arrays and steps; here they meet:

- the formation becomes *ready*: every session is opened on the executors and
  its executables are loaded again, then queues move on;
- it stops being ready: every array is gone, every running step has failed
  (WorkerLostError), what was being opened or loaded waits for the next generation.

Commands to executors are broadcast under one sequence number and are done when
every node has answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import ResourceLimitError, SessionError, ShardwrightError, WorkerLostError
from shardwright.server.limits import Limits
from shardwright.server.master import drain, saves, snapshots, watchdog
from shardwright.server.master import events as ev
from shardwright.server.master.formation import Formation, Identity, Member
from shardwright.server.master.sessions import Executable, QueuedRequest, Session, StepOutcome

Commands = list[ev.Command]


@dataclass(slots=True)
class Pending:
    """A broadcast that not every node has answered: `waiting` nodes, and what the others said.

    failed_s: when the first node reported an error; the divergence clock.
    sent_s, limit_s, usual_s, cancelled_s: the watchdog's; by its clock. verdict: the error it gave the command.
    """

    command: ev.ToWorkers
    waiting: set[int]
    sent_s: float
    limit_s: float
    usual_s: float = 0.0
    cancelled_s: float | None = None
    verdict: ShardwrightError | None = None
    error: ShardwrightError | None = None
    failed_s: float | None = None
    values: tuple[Any, ...] = ()
    run_s: float = 0.0
    written_bytes: int = 0
    traces: tuple[Any, ...] = ()
    not_finite: tuple[Any, ...] = ()


@dataclass(slots=True)
class MasterState:
    """See the module's docstring. `check_invariants` holds between any two events."""

    formation: Formation
    limits: Limits
    sessions: dict[str, Session] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    sequence: int = 0
    watchdog: watchdog.Watchdog = field(default_factory=lambda: watchdog.Watchdog(watchdog.AwakeClock()))
    drain: drain.Drain | None = None
    _now_s: float = 0.0

    @classmethod
    def create(
        cls, members: tuple[Member, ...], identity: Identity, limits: Limits, *, wait_s: float, now_s: float = 0.0
    ) -> MasterState:
        return cls(formation=Formation(members, identity, limits, wait_s=wait_s, now_s=now_s), limits=limits)

    def handle(self, event: ev.Event, now_s: float) -> Commands:
        """Take in one event at time `now_s` (seconds, any origin, never backwards)."""
        self._now_s = now_s
        self.watchdog.clock.advance(now_s)
        formation_handler = _FORMATION_HANDLERS.get(type(event))
        if formation_handler is not None:
            commands = self._with_formation(formation_handler(self.formation, event, now_s))
            return [*commands, snapshots.retain(self)] if isinstance(event, ev.DaemonJoined) else commands
        return _HANDLERS[type(event)](self, event)

    # ---- the cluster comes and goes ----------------------------------------
    def _with_formation(self, commands: Commands) -> Commands:
        """Add what sessions need after the formation may have changed its phase."""
        phase = self.formation.phase
        opened = any(session.is_open for session in self.sessions.values())
        if phase != "ready" and (self.pending or opened):
            commands = commands + self._fail_pending()
        elif phase == "ready":
            for session in self.sessions.values():
                if not session.is_open and not self._is_pending(ev.OpenOnWorkers, session.session_id):
                    commands = commands + self._open(session.session_id)
        return commands

    def _fail_pending(self) -> Commands:
        loss = self.formation.last_loss
        assert loss is not None
        pending = dict(self.pending)
        self.pending.clear()
        commands: Commands = []
        for session in self.sessions.values():
            session.is_open = False
            for array_id in list(session.arrays):
                session.drop_array(array_id, loss)
            for number, sequence in sorted(session.running.items()):
                session.finish(number, StepOutcome(error=self._loss_of(session, pending[sequence], loss)))
            for executable in session.executables.values():
                if executable.state == "loaded":
                    executable.state = "loading"
            commands += self._drop_refused_loads(session, pending)
            commands += saves.lose(session, loss, self._now_s)
            commands += snapshots.tell_loss(session, loss)
            commands += self._reply_steps(session) + self._advance(session)
        return commands

    @staticmethod
    def _drop_refused_loads(session: Session, pending: dict[int, Pending]) -> Commands:
        """A load that hung is not tried again."""
        commands: Commands = []
        for item in pending.values():
            command = item.command
            if item.verdict is None or not isinstance(command, ev.LoadOnWorkers):
                continue
            if command.session_id == session.session_id and command.program.plan_id in session.executables:
                calls = session.executables.pop(command.program.plan_id).waiting_calls
                commands += [ev.Fail(call=call, error=item.verdict) for call in calls]
        return commands

    def _loss_of(self, session: Session, item: Pending, loss: ShardwrightError) -> ShardwrightError:
        """The watchdog's verdict, or the loss with the stages that the lost node computed in a step of a pipeline."""
        command = item.command
        assert isinstance(command, ev.RunOnWorkers)
        if item.verdict is not None:
            return item.verdict
        if item.cancelled_s is not None:
            return watchdog.cancelled(f"step {command.step.number} was cancelled before it had ended")
        executable = session.executable_of(command.step)
        nodes_of_stages = executable.program.stages if executable is not None and executable.program else ()
        stages = [str(number) for number, nodes in enumerate(nodes_of_stages) if self.formation.last_lost in nodes]
        if not stages:
            return loss
        what = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(stages)}"
        return type(loss)(f"{loss.message}; it computed {what} of step {command.step.number}", remedy=loss.remedy)

    def _open(self, session_id: str) -> Commands:
        return self._broadcast(lambda sequence: ev.OpenOnWorkers(sequence=sequence, session_id=session_id))

    def _is_pending(self, kind: type[ev.ToWorkers], session_id: str) -> bool:
        return any(
            isinstance(item.command, kind) and item.command.session_id == session_id  # type: ignore[union-attr]
            for item in self.pending.values()
        )

    def _broadcast(self, make: Callable[[int], ev.ToWorkers]) -> Commands:
        self.sequence += 1
        command = make(self.sequence)
        self.pending[self.sequence] = Pending(
            command=command,
            waiting=set(self.formation.nodes),
            sent_s=self.watchdog.clock.now_s,
            limit_s=self.limits.load_s if isinstance(command, ev.LoadOnWorkers) else self.limits.step_s,
        )
        return [command]

    @property
    def summary(self) -> str:
        """The state of everything in a word; see `StatusReply.state`."""
        formation = self.formation
        if self.drain is not None:
            return "draining"
        if formation.phase != "ready":
            return "degraded" if any(formation.node_state(node) == "lost" for node in formation.nodes) else "waiting"
        if watchdog.find_stalled(self) is not None or formation.has_suspects:
            return "stalled"
        return "degraded" if formation.lacks_daemons else "ready"

    # ---- executors answer --------------------------------------------------
    def _command_done(self, event: ev.CommandDone) -> Commands:
        node = self.formation.connections.get(event.connection)
        item = self.pending.get(event.sequence)
        if node is None or item is None or node not in item.waiting:
            return []
        item.waiting.discard(node)
        item.run_s = max(item.run_s, event.run_s)
        item.values = item.values or event.values
        item.written_bytes += event.written_bytes
        item.traces += event.traces
        item.not_finite += event.not_finite
        is_news = event.error is not None and item.error is None
        if is_news:
            item.error, item.failed_s = event.error, self._now_s
        if item.waiting:
            return self._abort(item) if is_news else []
        del self.pending[event.sequence]
        self._record_run(item, watchdog.record_end(self, item))
        finish = _FINISHERS.get(type(item.command))
        return finish(self, item) if finish is not None else []

    def _record_run(self, item: Pending, took_s: float) -> None:
        """Remember how long the steps of an executable take."""
        command = item.command
        if not isinstance(command, ev.RunOnWorkers) or item.error is not None:
            return
        session = self.sessions.get(command.step.session_id)
        executable = session.executables.get(command.step.executable_id) if session is not None else None
        if executable is not None:
            executable.longest_run_s = max(executable.longest_run_s, took_s)

    def _abort(self, item: Pending) -> Commands:
        """A step failed on one node: the others may be waiting on its transfers."""
        if not isinstance(item.command, ev.RunOnWorkers) or item.error is None:
            return []
        return [ev.AbortOnWorkers(sequence=item.command.sequence, nodes=frozenset(item.waiting), error=item.error)]

    def _finish_open(self, item: Pending) -> Commands:
        assert isinstance(item.command, ev.OpenOnWorkers)
        session = self.sessions.get(item.command.session_id)
        if session is None:
            return []
        session.is_open = True
        commands: Commands = []
        if session.open_call is not None:
            commands.append(ev.Answer(call=session.open_call))
            session.open_call = None
        commands += self._tell_losses(session)
        for executable in session.executables.values():
            if executable.state == "loading":
                commands += self._load(session, executable)
        return commands + self._advance(session)

    def _tell_losses(self, session: Session) -> Commands:
        """New executors know nothing of the arrays of before: who reads one shall not wait for it.

        A client that takes snapshots restores them under their ids.
        """
        if session.snapshots.is_told:
            return []
        lost: dict[int, tuple[ShardwrightError, list[int]]] = {}
        for array_id, why in session.drop_reasons.items():
            if isinstance(why, WorkerLostError):
                lost.setdefault(id(why), (why, []))[1].append(array_id)
        return [
            command
            for why, array_ids in lost.values()
            for command in self._release_on_workers(session, tuple(array_ids), why)
        ]

    def _release_on_workers(
        self, session: Session, array_ids: tuple[int, ...], error: ShardwrightError | None
    ) -> Commands:
        return self._broadcast(
            lambda sequence: ev.ReleaseOnWorkers(
                sequence=sequence, session_id=session.session_id, array_ids=array_ids, error=error
            )
        )

    def _finish_load(self, item: Pending) -> Commands:
        assert isinstance(item.command, ev.LoadOnWorkers)
        session = self.sessions.get(item.command.session_id)
        executable = session.executables.get(item.command.program.plan_id) if session is not None else None
        if session is None or executable is None:
            return []
        calls, executable.waiting_calls = executable.waiting_calls, []
        if item.error is not None:
            del session.executables[executable.plan_id]
            fail: Commands = [ev.Fail(call=call, error=item.error) for call in calls]
            return fail + self._advance(session)
        executable.state = "loaded"
        return [*(ev.Answer(call=call, value=executable.program) for call in calls), *self._advance(session)]

    def _finish_run(self, item: Pending) -> Commands:
        assert isinstance(item.command, ev.RunOnWorkers)
        step = item.command.step
        session = self.sessions.get(step.session_id)
        if session is None:
            return []
        if item.error is not None:
            for array_id in step.outputs:
                if array_id in session.arrays:
                    session.drop_array(array_id, item.error)
        outcome = StepOutcome(
            error=item.error, values=item.values, run_s=item.run_s, traces=item.traces, not_finite=item.not_finite
        )
        session.finish(step.number, outcome)
        replies = self._reply_steps(session)
        if step.snapshot is not None and not step.snapshot.is_restore:
            return replies + snapshots.finish_copy(self, session, item)
        is_save = step.files is not None and step.files.is_save
        return replies + (saves.finish_copy(self, session, item) if is_save else [])

    # ---- sessions ----------------------------------------------------------
    def _session_requested(self, event: ev.SessionRequested) -> Commands:
        if (refused := drain.refusal_of_new(self)) is not None:
            return [ev.Fail(call=event.call, error=refused)]
        commands: Commands = []
        if len(self.sessions) >= self.limits.sessions:
            commands = self._make_room()
        if len(self.sessions) >= self.limits.sessions:
            error = ResourceLimitError(
                f"the server has {len(self.sessions)} sessions, its limit",
                remedy="close sessions, or wait for one to end",
            )
            return [ev.Fail(call=event.call, error=error)]
        session = Session(
            session_id=event.session_id, limits=self.limits, last_seen_s=self._now_s, open_call=event.call
        )
        self.sessions[event.session_id] = session
        return commands + self._with_formation([])

    def _make_room(self) -> Commands:
        """End the idle session that would be missed least, if there is one: see `Limits.evict_idle_s`."""
        idle = [
            session
            for session in self.sessions.values()
            if self._now_s - session.last_seen_s > self.limits.evict_idle_s
            and not self._is_busy(session)
            and (session.stream is None or not session.holds_anything)
        ]
        if not idle:
            return []
        least = min(idle, key=lambda each: (each.holds_anything, each.stream is not None, each.last_seen_s))
        why = f"the server was full, and the session had been idle for {self._now_s - least.last_seen_s:.0f} s"
        commands: Commands = [ev.Log(text=f"session {least.session_id[:8]} gives way to a new one")]
        return commands + self._end_session(least.session_id, SessionError(why, remedy="connect again"))

    @staticmethod
    def _is_busy(session: Session) -> bool:
        """Whether somebody waits for something that it does."""
        waits = any(executable.waiting_calls for executable in session.executables.values())
        waits = waits or saves.current_save(session) is not None or session.open_call is not None
        return waits or bool(session.running or session.queue)

    def _session_closed(self, event: ev.SessionClosed) -> Commands:
        reason = SessionError("the session was closed", remedy="open a new session")
        commands = self._end_session(event.session_id, reason) if event.session_id in self.sessions else []
        return [*commands, ev.Answer(call=event.call)]

    def _end_session(self, session_id: str, reason: ShardwrightError) -> Commands:
        session = self.sessions.pop(session_id)
        calls = [call for executable in session.executables.values() for call in executable.waiting_calls]
        calls += [session.open_call] if session.open_call is not None else []
        calls += [item.request.call for item in session.queue if isinstance(item.request, ev.ReleaseRequested)]
        commands: Commands = [ev.Fail(call=call, error=reason) for call in calls]
        compiling = [plan_id for plan_id, each in session.executables.items() if each.state == "compiling"]
        commands += self._cancel_compiles(compiling) + saves.lose(session, reason, self._now_s)
        if session.stream is not None:
            commands.append(ev.EndStream(stream=session.stream, error=reason))
        for sequence in session.running.values():
            self._cancel_running(sequence)
        if session.is_open or self._is_pending(ev.OpenOnWorkers, session_id):
            commands += self._broadcast(lambda sequence: ev.CloseOnWorkers(sequence=sequence, session_id=session_id))
        forget = [snapshots.retain(self)] if session.snapshots.is_told else []
        return [*commands, ev.SessionEnded(session_id=session_id), *forget]

    def _session_touched(self, event: ev.SessionTouched) -> Commands:
        if event.session_id in self.sessions:
            self.sessions[event.session_id].last_seen_s = self._now_s
        return []

    def _arrays_arrived(self, event: ev.ArraysUploaded) -> Commands:
        node = self.formation.connections.get(event.connection)
        session = self.sessions.get(event.session_id)
        if node is None or session is None:
            return []
        session.last_seen_s = self._now_s
        commands: Commands = []
        for array in event.arrays:
            session.record_arrival(array.array_id, array.size_bytes, node, self.formation.nodes_of(array.devices))
            excess = session.excess(0, 0)
            commands += self._reject_array(session, array.array_id, excess) if excess else []
        return [*commands, *self._advance(session)]

    def _reject_array(self, session: Session, array_id: int, error: ShardwrightError) -> Commands:
        """Free an array uploaded to a full session; its readers are told."""
        session.drop_array(array_id, error)
        return self._release_on_workers(session, (array_id,), error)

    # ---- executables -------------------------------------------------------
    def _load_requested(self, event: ev.LoadRequested) -> Commands:
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.Fail(call=event.call, error=unknown_session(event.session_id))]
        session.last_seen_s = self._now_s
        executable = session.executables.get(event.plan_id)
        refused = drain.refusal_of_new(self)
        if refused is not None and (executable is None or executable.state != "loaded"):
            return [ev.Fail(call=event.call, error=refused)]
        if executable is None:
            executable = session.executables[event.plan_id] = Executable(plan_id=event.plan_id)
            executable.waiting_calls.append(event.call)
            return [
                ev.Progress(call=event.call, phase="emit and compile"),
                ev.Compile(plan_id=event.plan_id, session_id=event.session_id),
            ]
        if executable.state == "loaded":
            return [ev.Answer(call=event.call, value=executable.program)]
        executable.waiting_calls.append(event.call)
        return [ev.Progress(call=event.call, phase="emit and compile" if executable.program is None else "load")]

    def _load_abandoned(self, event: ev.LoadAbandoned) -> Commands:
        """A program that nobody waits for is not compiled to its end; one that is being loaded stays."""
        session = self.sessions.get(event.session_id)
        executable = session.executables.get(event.plan_id) if session is not None else None
        if session is None or executable is None or event.call not in executable.waiting_calls:
            return []
        executable.waiting_calls.remove(event.call)
        if executable.waiting_calls or executable.state != "compiling":
            return []
        del session.executables[event.plan_id]
        return self._cancel_compiles([event.plan_id]) + self._advance(session)

    def _cancel_compiles(self, plan_ids: Iterable[str]) -> Commands:
        """Of those that no session has under way."""
        wanted = {
            executable.plan_id
            for session in self.sessions.values()
            for executable in session.executables.values()
            if executable.state == "compiling"
        }
        return [ev.CancelCompile(plan_id=plan_id) for plan_id in plan_ids if plan_id not in wanted]

    def _compile_finished(self, event: ev.CompileFinished) -> Commands:
        commands: Commands = []
        for session in self.sessions.values():
            executable = session.executables.get(event.plan_id)
            if executable is None or executable.state != "compiling":
                continue
            if event.error is not None:
                del session.executables[event.plan_id]
                commands += [ev.Fail(call=call, error=event.error) for call in executable.waiting_calls]
                commands += self._advance(session)
                continue
            executable.program, executable.state = event.program, "loading"
            commands += [ev.Progress(call=call, phase="load") for call in executable.waiting_calls]
            if session.is_open:
                commands += self._load(session, executable)
        return commands

    def _load(self, session: Session, executable: Executable) -> Commands:
        program = executable.program
        assert program is not None
        return self._broadcast(
            lambda sequence: ev.LoadOnWorkers(sequence=sequence, session_id=session.session_id, program=program)
        )

    def _unload_requested(self, event: ev.UnloadRequested) -> Commands:
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.Fail(call=event.call, error=unknown_session(event.session_id))]
        executable = session.executables.pop(event.executable_id, None)
        commands: Commands = [ev.Answer(call=event.call)]
        if executable is not None:
            gone = SessionError(f"executable {event.executable_id} was unloaded while it was being loaded")
            commands += [ev.Fail(call=call, error=gone) for call in executable.waiting_calls]
            if executable.state == "compiling":
                commands += self._cancel_compiles([event.executable_id])
            if session.is_open and executable.state != "compiling":
                commands += self._broadcast(
                    lambda sequence: ev.UnloadOnWorkers(
                        sequence=sequence, session_id=event.session_id, executable_id=event.executable_id
                    )
                )
            commands += self._advance(session)
        return commands

    # ---- steps -------------------------------------------------------------
    def _steps_opened(self, event: ev.StepsOpened) -> Commands:
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.EndStream(stream=event.stream, error=unknown_session(event.session_id))]
        session.last_seen_s = self._now_s
        old, session.stream = session.stream, event.stream
        session.reply_cursor = 0  # the first number of the stream sets it
        newer = SessionError("a newer RunSteps stream of the session took over", remedy="use one stream a session")
        ended: Commands = [] if old is None else [ev.EndStream(stream=old, error=newer)]
        return ended + drain.notices(self, event.stream) + snapshots.repeat_end(session, event.stream)

    def _steps_closed(self, event: ev.StepsClosed) -> Commands:
        for session in self.sessions.values():
            if session.stream == event.stream:
                session.stream = None
                session.last_seen_s = self._now_s
        return []

    def _step_requested(self, event: ev.StepRequested) -> Commands:
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.EndStream(stream=event.stream, error=unknown_session(event.session_id))]
        if session.stream != event.stream:
            return []  # left over from a stream that was replaced
        session.last_seen_s = self._now_s
        refused = session.number_refusal(event.number)
        if refused is not None:
            session.stream = None
            return [ev.EndStream(stream=event.stream, error=refused)]
        session.reply_cursor = session.reply_cursor or event.number
        if event.number <= session.last_number:
            return self._reply_steps(session)  # sent again: it has run, or is about to
        session.last_number = event.number
        session.snapshots.is_told |= event.generation > 0
        if event.number in session.cancelled:
            session.cancelled.discard(event.number)
            return self._refuse_step(session, event, watchdog.cancelled_in_time(event.number))
        session.enqueue(event, self._now_s)
        return self._advance(session)

    def _steps_cancelled(self, event: ev.StepsCancelled) -> Commands:
        """Steps that wait, or have yet to come, fail at once; those that run get a grace, see `watchdog.py`."""
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.Fail(call=event.call, error=unknown_session(event.session_id))]
        session.last_seen_s = self._now_s
        numbers = set(event.numbers)
        running = sorted(numbers & session.running.keys())
        for number in running:
            self._cancel_running(session.running[number])
        commands: Commands = []
        steps = [item.request for item in session.queue if isinstance(item.request, ev.StepRequested)]
        waiting = [step for step in steps if step.number in numbers]
        gone = {id(step) for step in waiting}
        session.queue = deque(item for item in session.queue if id(item.request) not in gone)
        for step in waiting:
            commands += self._refuse_step(session, step, watchdog.cancelled_in_time(step.number))
        last = session.last_number
        on_their_way = {number for number in numbers if last < number <= last + self.limits.pending_steps}
        session.cancelled |= on_their_way
        never_run = sorted({step.number for step in waiting} | on_their_way)
        done = ev.Cancellation(cancelled=tuple(never_run), running=tuple(running))
        return [*commands, ev.Answer(call=event.call, value=done), *self._advance(session)]

    def _cancel_running(self, sequence: int) -> None:
        item = self.pending[sequence]
        if item.cancelled_s is None:
            item.cancelled_s = self.watchdog.clock.now_s

    def _reply_steps(self, session: Session) -> Commands:
        """Replies that are due on the session's stream, in the order of their numbers."""
        commands: Commands = []
        while session.stream is not None and session.reply_cursor in session.outcomes:
            outcome = session.outcomes[session.reply_cursor]
            commands.append(
                ev.ReplyStep(
                    stream=session.stream, number=session.reply_cursor, error=outcome.error, values=outcome.values,
                    run_s=outcome.run_s, traces=outcome.traces, not_finite=outcome.not_finite,
                )
            )  # fmt: skip
            session.reply_cursor += 1
        return commands

    def _release_requested(self, event: ev.ReleaseRequested) -> Commands:
        session = self.sessions.get(event.session_id)
        if session is None:
            return [ev.Fail(call=event.call, error=unknown_session(event.session_id))]
        session.last_seen_s = self._now_s
        session.enqueue(event, self._now_s)
        return self._advance(session)

    def _advance(self, session: Session) -> Commands:
        """Dispatch from the head of the queue, until it has to wait."""
        commands: Commands = []
        queue: deque[QueuedRequest] = session.queue
        while queue:
            item = queue[0]
            request = item.request
            if isinstance(request, ev.ReleaseRequested):
                if request.after_step > session.last_number and not session.is_late(item, self._now_s):
                    break
                queue.popleft()
                commands += self._release(session, request)
                continue
            error = (
                drain.refusal(self, session, item)
                or snapshots.stale(self, request)
                or session.refusal(request)
                or session.lateness(item, self._now_s)
            )
            if error is not None:
                queue.popleft()
                commands += self._refuse_step(session, request, error)
            elif self._can_run(session, request):
                queue.popleft()
                commands += self._run(session, request)
            else:
                break
        return commands

    def _run(self, session: Session, step: ev.StepRequested) -> Commands:
        commands = self._broadcast(lambda sequence: ev.RunOnWorkers(sequence=sequence, step=step))
        executable = session.executables.get(step.executable_id)
        item = self.pending[self.sequence]
        item.limit_s = watchdog.step_limit_s(self.limits, step, executable)
        item.usual_s = watchdog.usual_s(executable)
        session.start(step, self.sequence, self._now_s)
        return commands

    def _can_run(self, session: Session, step: ev.StepRequested) -> bool:
        return session.is_open and session.is_loaded(step) and not session.missing_arguments(step)

    def _refuse_step(self, session: Session, step: ev.StepRequested, error: ShardwrightError) -> Commands:
        """A step that never reaches the workers; clients waiting on its outputs are told."""
        outputs = tuple(array_id for array_id in step.outputs if array_id and array_id not in session.arrays)
        for array_id in outputs:
            session.drop_array(array_id, error)
        session.finish(step.number, StepOutcome(error=error))
        commands = self._reply_steps(session)
        if session.is_open and outputs:
            commands += self._release_on_workers(session, outputs, error)
        return commands

    def _release(self, session: Session, request: ev.ReleaseRequested) -> Commands:
        there = tuple(array_id for array_id in dict.fromkeys(request.array_ids) if session.drop_array(array_id))
        commands: Commands = [ev.Answer(call=request.call)]
        if there and session.is_open:
            commands += self._release_on_workers(session, there, None)
        return commands

    # ---- time --------------------------------------------------------------
    def _tick(self, event: ev.Tick) -> Commands:
        del event
        commands = self._with_formation(self.formation.tick(self._now_s))
        commands += self._with_formation(self.formation.watch(self.watchdog.clock.now_s, self._now_s))
        for session in list(self.sessions.values()):
            commands += self._advance(session)
            limits, idle_s, text = self.limits, self._now_s - session.last_seen_s, ""
            if session.stream is None and idle_s > limits.grace_s:
                text = f"its client was away for {limits.grace_s:g} s"
            elif idle_s > limits.session_idle_s:
                text = f"its client asked for nothing for {limits.session_idle_s:g} s"
            if text and not self._is_busy(session):
                reason = SessionError(f"the session ended: {text}", remedy="connect again")
                commands += [ev.Log(text=f"session {session.session_id[:8]} expired")]
                commands += self._end_session(session.session_id, reason)
        commands += saves.tick(self) + self._check_divergence() + watchdog.tick(self)
        return commands + drain.tick(self)

    def _check_divergence(self) -> Commands:
        for sequence, item in self.pending.items():
            if saves.is_file_work(item.command):
                continue
            if item.failed_s is not None and self._now_s - item.failed_s > self.limits.divergence_s:
                nodes = ", ".join(map(str, sorted(item.waiting)))
                reason = f"command {sequence} failed on one node ({item.error}) while node {nodes} went on"
                return self._with_formation(self.formation.restart(reason, self._now_s))
        return []

    # ---- invariants --------------------------------------------------------
    def check_invariants(self) -> None:
        """Invariants between any two events; AssertionError on violation."""
        self.formation.check_invariants()
        is_ready = self.formation.phase == "ready"
        assert bool(self.pending) <= is_ready, "nothing is pending without a cluster"
        running = {
            item.command.step.session_id: item
            for item in self.pending.values()
            if isinstance(item.command, ev.RunOnWorkers)
        }
        for sequence, item in self.pending.items():
            assert item.waiting, "a broadcast that all have answered is not pending"
            assert item.waiting <= set(self.formation.nodes)
            assert item.command.sequence == sequence <= self.sequence
        for session in self.sessions.values():
            session.check_invariants()
            saves.check_invariants(self, session)
            assert session.is_open <= is_ready
            assert bool(session.running) <= (session.session_id in running)
            assert (session.open_call is None) or not session.is_open
            for executable in session.executables.values():
                assert (executable.state == "loaded") <= (session.is_open and not executable.waiting_calls)
                assert (executable.state == "compiling") == (executable.program is None)


def unknown_session(session_id: str) -> SessionError:
    return SessionError(
        f"no session {session_id[:8] or '(empty)'}: it was closed, expired, or belongs to a server that was restarted",
        remedy="open a new session",
    )


_FORMATION_HANDLERS: dict[type[ev.Event], Callable[[Formation, Any, float], Commands]] = {
    ev.DaemonJoined: Formation.daemon_joined,
    ev.DaemonHeard: Formation.daemon_heard,
    ev.DaemonLeft: Formation.daemon_left,
    ev.ExecutorJoined: Formation.executor_joined,
    ev.ExecutorExited: Formation.executor_exited,
    ev.ExecutorLeft: Formation.executor_left,
    ev.ExecutorHeard: Formation.executor_heard,
}
_HANDLERS: dict[type[ev.Event], Callable[[MasterState, Any], Commands]] = {
    ev.CommandDone: MasterState._command_done,
    ev.ArraysUploaded: MasterState._arrays_arrived,
    ev.SessionRequested: MasterState._session_requested,
    ev.SessionClosed: MasterState._session_closed,
    ev.SessionTouched: MasterState._session_touched,
    ev.LoadRequested: MasterState._load_requested,
    ev.LoadAbandoned: MasterState._load_abandoned,
    ev.CompileFinished: MasterState._compile_finished,
    ev.UnloadRequested: MasterState._unload_requested,
    ev.StepsOpened: MasterState._steps_opened,
    ev.StepsClosed: MasterState._steps_closed,
    ev.StepRequested: MasterState._step_requested,
    ev.StepsCancelled: MasterState._steps_cancelled,
    ev.SaveAwaited: saves.wait_requested,
    ev.ReleaseRequested: MasterState._release_requested,
    ev.DrainRequested: drain.requested,
    ev.Tick: MasterState._tick,
}
_FINISHERS: dict[type[ev.ToWorkers], Callable[[MasterState, Pending], Commands]] = {
    ev.OpenOnWorkers: MasterState._finish_open,
    ev.LoadOnWorkers: MasterState._finish_load,
    ev.RunOnWorkers: MasterState._finish_run,
    ev.WriteOnWorkers: saves.finish_write,
    ev.FinishOnWorkers: saves.finish_commit,
    ev.StoreOnWorkers: snapshots.finish_store,
}
