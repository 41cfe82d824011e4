"""The launcher's decisions about servers: as in `supervision.py`, but a server that is lost is started again.

| a task ends with    | then                                                                                     |
|---------------------|------------------------------------------------------------------------------------------|
| 0                   | it has ended as asked; after the master no task is started any more                      |
| 75, or by a signal  | it is started again, after a pause                                                       |
| any other exit code | the others are ended; of a cluster that may shrink, the master's alone has this effect   |

A host that is lost is reached again in the same way, and its servers are started there. Pauses are doubled from
`FIRST_PAUSE_S` to `LAST_PAUSE_S`; a server that ran for `STEADY_S` begins with the first again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from shardwright.launch.supervision import (
    Action,
    CloseNode,
    Event,
    NodeLost,
    NodeReady,
    OpenNode,
    ProcessEnded,
    Say,
    StartProcesses,
    Supervisor,
)
from shardwright.launch.tuning import FIRST_PAUSE_S, LAST_PAUSE_S, STEADY_S
from shardwright.processes import describe_exit

#: The task whose server is the master's.
MASTER = 0


class ServerSupervisor(Supervisor):
    """The servers of one cluster, by task, from their start to their end.

    may_shrink: the cluster goes on without servers that cannot be started. The rest: see `Supervisor`.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        *,
        may_shrink: bool,
        start_timeout_s: float,
        grace_s: float,
        now_s: float = 0.0,
    ) -> None:
        super().__init__(hosts, start_timeout_s=start_timeout_s, grace_s=grace_s, now_s=now_s)
        self._may_shrink = may_shrink
        self._has_master_ended = False  # as asked
        self._open: set[str] = set()
        self._opening: dict[str, float] = {}  # host → until when it may answer
        self._due: dict[int, float] = {}  # task → when it is started again
        self._pauses: dict[int, float] = {}  # task → the last pause
        self._since: dict[int, float] = {}  # task → when it was started

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Handle an event: the actions it requires. None follow `Finish`."""
        actions = super().handle(event, now_s)
        for action in actions:
            if isinstance(action, StartProcesses):
                self._since.update(dict.fromkeys(action.numbers, now_s))
        if self._phase == "running":
            waiting = [due_s for task, due_s in self._due.items() if self._hosts[task] not in self._opening]
            self.deadline_s = min([*waiting, *self._opening.values()], default=None)
        return actions

    # ---- hosts ----
    def _on_node_ready(self, event: NodeReady) -> list[Action]:
        self._opening.pop(event.host, None)
        self._open.add(event.host)
        if self._phase != "running":
            return super()._on_node_ready(event)
        return self._start({task for task in self._due if self._hosts[task] == event.host})

    def _on_node_lost(self, event: NodeLost, now_s: float) -> list[Action]:
        self._opening.pop(event.host, None)
        self._open.discard(event.host)
        is_needed = self._phase == "starting" and not (self._may_shrink and self._hosts[MASTER] != event.host)
        if is_needed or self._phase not in ("starting", "running"):
            return super()._on_node_lost(event, now_s)
        lost = {task for task in self._running | self._due.keys() if self._hosts[task] == event.host}
        if not lost:
            return []
        self._running -= lost
        if event.host in self._silent:
            self._silent.remove(event.host)
        said = self._start_later(lost, f"{event.host} is lost: {event.reason}", now_s)
        return [CloseNode(event.host), *said, *self._start_if_ready()]

    # ---- servers ----
    def _on_process_ended(self, event: ProcessEnded, now_s: float) -> list[Action]:
        task = event.number
        if self._phase != "running" or task not in self._running:
            return super()._on_process_ended(event, now_s)
        self._running.discard(task)
        if event.code == 0 and task == MASTER:
            self._has_master_ended = True
            self._due.clear()
        name = f"task {task} on {self._hosts[task]}"
        is_temporary = not event.reason and (event.code < 0 or event.code == os.EX_TEMPFAIL)
        if is_temporary and not self._has_master_ended:
            return self._start_later({task}, f"{name} ended with {describe_exit(event.code)}", now_s)
        if event.code and task != MASTER and (self._may_shrink or self._has_master_ended):
            how = event.reason or f"ended with {describe_exit(event.code)}"
            return [Say(f"{name} {how}: it is not started again"), *self._finish_if_over()]
        return super()._on_process_ended(event, now_s)

    def _start_later(self, tasks: Iterable[int], why: str, now_s: float) -> list[Action]:
        longest_s = 0.0
        for task in tasks:
            was_steady = now_s - self._since.get(task, now_s) >= STEADY_S
            before_s = 0.0 if was_steady else self._pauses.get(task, 0.0)
            pause_s = self._pauses[task] = min(max(2 * before_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            self._due[task] = now_s + pause_s
            longest_s = max(longest_s, pause_s)
        return [Say(f"{why}; it is started again in {longest_s:g} s")]

    def _start(self, tasks: Iterable[int]) -> list[Action]:
        numbers = tuple(sorted(tasks))
        for task in numbers:
            del self._due[task]
        self._running.update(numbers)
        return [StartProcesses(numbers)] if numbers else []

    def _on_failure(self, event: ProcessEnded | NodeLost, exit_code: int, now_s: float) -> list[Action]:
        self._due.clear()
        return super()._on_failure(event, exit_code, now_s)

    # ---- time, and the end ----
    def _on_tick(self, now_s: float) -> list[Action]:
        if self._phase != "running":
            return super()._on_tick(now_s)
        actions: list[Action] = []
        for host in [host for host, until_s in self._opening.items() if until_s <= now_s]:
            actions += self._on_node_lost(NodeLost(host, f"no answer within {self._start_timeout_s:g} s"), now_s)
        due = {task for task, due_s in self._due.items() if due_s <= now_s}
        for host in sorted({self._hosts[task] for task in due} - self._open - self._opening.keys()):
            self._opening[host] = now_s + self._start_timeout_s
            actions.append(OpenNode(host))
        return actions + self._start({task for task in due if self._hosts[task] in self._open})

    def _end(self, number: int, grace_s: float, now_s: float) -> list[Action]:
        self._due.clear()
        return super()._end(number, grace_s, now_s) if self._running else self._finish()

    def _finish_if_over(self) -> list[Action]:
        return [] if self._due else super()._finish_if_over()
