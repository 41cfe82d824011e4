"""Programs and plans of sessions: kept once by content, dropped with their last session."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shardwright.errors import PlanError, ResourceLimitError
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.plans.plan_text import plan_from_json
from shardwright.protocol.wire import compress_text
from shardwright.server.master.programs import StoredProgram
from shardwright.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """A plan, its JSON gzip-compressed for clients, and the program it was made for.

    plan: without the text of that program, where that is what it runs. first_device: of a single-program plan.
    team: the nodes that it is for.
    """

    plan: Plan | PipelinePlan
    json_gzip: bytes
    program: StoredProgram | None = None
    first_device: int = 0
    team: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan_json: str, program: StoredProgram, first_device: int, team: tuple[int, ...] = ()) -> PlanRecord:
        """Blocking. Raises PlanError where the plan is none of the program."""
        plan = plan_from_json(plan_json, hlo_text=program.text())
        if isinstance(plan, PipelinePlan) or not plan.original_sha256:
            plan = replace(plan, hlo_text=None)
        json_gzip = compress_text(plan_json)
        return cls(plan=plan, json_gzip=json_gzip, program=program, first_device=first_device, team=team)

    def plan_with_text(self) -> Plan | PipelinePlan:
        """The plan with the text that it runs; blocking."""
        plan = self.plan
        if self.program is None or isinstance(plan, PipelinePlan) or plan.hlo_text is not None:
            return plan
        return replace(plan, hlo_text=self.program.text())


class ContentStore(Generic[T]):
    """Items by id; each is held by the sessions that put it there.

    limit: number of items of a session. session_bytes, person_bytes, total_bytes: of the items of one session, of one
    person and of all, with those that come in. person_of: whose a session is.
    """

    def __init__(
        self,
        what: str,
        limit: int,
        *,
        session_bytes: float = math.inf,
        person_bytes: float = math.inf,
        total_bytes: float = math.inf,
        person_of: Callable[[str], str] = lambda session_id: session_id,
    ) -> None:
        self._what = what
        self._limit = limit
        self._session_bytes = session_bytes
        self._person_bytes = person_bytes
        self._total_bytes = total_bytes
        self._person_of = person_of
        self._items: dict[str, T] = {}
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}
        self._coming: Counter[str] = Counter()  # bytes, by session

    def put(self, session_id: str, item_id: str, item: T, size_bytes: int = 0) -> None:
        """Raises ResourceLimitError if the session, its person, or the server, holds too much already."""
        held = sum(session_id in holders for holders in self._holders.values())
        if session_id not in self._holders.get(item_id, ()):
            if held >= self._limit:
                raise ResourceLimitError(
                    f"the session holds {held} {self._what}s, its limit", remedy="close the session and open a new one"
                )
            self._require_room(session_id, self._sizes.get(item_id, size_bytes), is_new=item_id not in self._items)
        self._items.setdefault(item_id, item)
        self._sizes.setdefault(item_id, size_bytes)
        self._holders.setdefault(item_id, set()).add(session_id)

    @contextmanager
    def arrival(self, session_id: str) -> Iterator[Callable[[int], None]]:
        """Within, an item of the session comes in: tell of each part how large it is.

        That raises ResourceLimitError where the item cannot be put.
        """
        came_bytes = 0

        def came(size_bytes: int) -> None:
            nonlocal came_bytes
            self._require_room(session_id, size_bytes)
            came_bytes += size_bytes
            self._coming[session_id] += size_bytes

        try:
            yield came
        finally:
            self._coming[session_id] -= came_bytes
            self._coming += Counter()  # forgets sessions without any

    def _require_room(self, session_id: str, size_bytes: int, *, is_new: bool = True) -> None:
        """Raises ResourceLimitError unless so many bytes more may be held. is_new: nobody holds them yet."""
        mine = size_bytes + self._held_bytes({session_id})
        if mine > self._session_bytes:
            raise ResourceLimitError(
                f"the session's {self._what}s would take {format_bytes(mine)}, its limit is "
                f"{format_bytes(int(self._session_bytes))}",
                remedy="close the session and open a new one, or hoist large constants into arguments",
            )
        person = self._person_of(session_id)
        theirs = size_bytes + self.person_bytes(person)
        if theirs > self._person_bytes:
            raise ResourceLimitError(
                f"the {self._what}s of all sessions of {person} would take {format_bytes(theirs)}, the limit is "
                f"{format_bytes(int(self._person_bytes))} for one person",
                remedy="close sessions, or hoist large constants into arguments",
            )
        total = sum(self._sizes.values()) + sum(self._coming.values())
        if is_new and total + size_bytes > self._total_bytes:
            raise ResourceLimitError(
                f"the {self._what}s of all sessions take {format_bytes(total)}, the server's limit is "
                f"{format_bytes(int(self._total_bytes))}",
                remedy="wait until other sessions end, or close them",
            )

    def person_bytes(self, person: str) -> int:
        """What all sessions of a person hold, and what comes in; what several of them hold counts once."""
        sessions = {*self._coming}.union(*self._holders.values())
        return self._held_bytes({session_id for session_id in sessions if self._person_of(session_id) == person})

    def _held_bytes(self, sessions: Set[str]) -> int:
        held = [item_id for item_id, holders in self._holders.items() if not sessions.isdisjoint(holders)]
        return sum(self._sizes[item_id] for item_id in held) + sum(self._coming[session_id] for session_id in sessions)

    def hold(self, session_id: str, item_id: str) -> T | None:
        """The item of that id, whoever put it there, now held by this session too; or None."""
        item = self._items.get(item_id)
        if item is not None:
            self.put(session_id, item_id, item, self._sizes[item_id])
        return item

    def get(self, session_id: str, item_id: str) -> T:
        """Raises PlanError if the session does not hold it."""
        if session_id not in self._holders.get(item_id, ()):
            raise PlanError(f"no {self._what} {item_id[:12] or '(empty)'} in this session", remedy="send it again")
        return self._items[item_id]

    def is_held(self, item_id: str) -> bool:
        return item_id in self._items

    def drop(self, is_unwanted: Callable[[T], bool]) -> list[str]:
        """Drops items, whoever holds them; returns their ids."""
        dropped = [item_id for item_id, item in self._items.items() if is_unwanted(item)]
        for item_id in dropped:
            del self._items[item_id], self._sizes[item_id], self._holders[item_id]
        return dropped

    def drop_session(self, session_id: str) -> None:
        for item_id in [item_id for item_id, holders in self._holders.items() if session_id in holders]:
            self._holders[item_id].discard(session_id)
            if not self._holders[item_id]:
                del self._holders[item_id], self._items[item_id], self._sizes[item_id]
