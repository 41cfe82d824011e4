"""Programs and plans of sessions: kept once by content, dropped with their last session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwright.errors import PlanError, ResourceLimitError
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """A plan with its program's text, its JSON gzip-compressed for clients, and its first device.

    first_device: of a single-program plan.
    """

    plan: Plan | PipelinePlan
    json_gzip: bytes
    first_device: int = 0


class ContentStore(Generic[T]):
    """Items by id; each is held by the sessions that put it there."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._items: dict[str, T] = {}
        self._holders: dict[str, set[str]] = {}

    def put(self, session_id: str, item_id: str, item: T) -> None:
        """Raises ResourceLimitError if the session holds too many already."""
        held = sum(session_id in holders for holders in self._holders.values())
        if held >= self._limit and session_id not in self._holders.get(item_id, ()):
            raise ResourceLimitError(
                f"the session holds {held} {self._what}s, its limit", remedy="close the session and open a new one"
            )
        self._items[item_id] = item
        self._holders.setdefault(item_id, set()).add(session_id)

    def hold(self, session_id: str, item_id: str) -> T | None:
        """The item of that id, whoever put it there, now held by this session too; or None."""
        item = self._items.get(item_id)
        if item is not None:
            self.put(session_id, item_id, item)
        return item

    def get(self, session_id: str, item_id: str) -> T:
        """Raises PlanError if the session does not hold it."""
        if session_id not in self._holders.get(item_id, ()):
            raise PlanError(f"no {self._what} {item_id[:12] or '(empty)'} in this session", remedy="send it again")
        return self._items[item_id]

    def is_held(self, item_id: str) -> bool:
        return item_id in self._items

    def drop_session(self, session_id: str) -> None:
        for item_id in [item_id for item_id, holders in self._holders.items() if session_id in holders]:
            self._holders[item_id].discard(session_id)
            if not self._holders[item_id]:
                del self._holders[item_id], self._items[item_id]
