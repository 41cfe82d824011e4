"""Who has sessions, and how much one person may have of what there is, so that others find room.

A person is a token's name, or a host where many share a token: see `Access.person_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.errors import ResourceLimitError
from shardwright.server.limits import Limits
from shardwright.units import format_bytes


@dataclass(slots=True)
class Person:
    """array_bytes: logical, of all their sessions. people: all of the server."""

    name: str
    people: People
    sessions: int = 0
    array_bytes: int = 0

    @property
    def most_array_bytes(self) -> float:
        return self.people.limits.most_person_array_bytes(self.people.memory_bytes)

    @property
    def has_all_sessions(self) -> bool:
        """Where others could have more."""
        limits = self.people.limits
        return limits.sessions > limits.most_person_sessions <= self.sessions

    def session_refusal(self) -> ResourceLimitError:
        """Of another session, where they have all that they may."""
        limits = self.people.limits
        return ResourceLimitError(
            f"{self.name} has {self.sessions} sessions, the limit is {limits.most_person_sessions} of the server's "
            f"{limits.sessions} for one person",
            remedy="close sessions (`shardwright status` lists them), wait until those that nobody uses end, or have "
            "the operator raise --person-sessions",
        )

    def excess(self, added_bytes: int) -> ResourceLimitError | None:
        """What is wrong with that many more bytes of arrays, or None."""
        size_bytes = self.array_bytes + added_bytes
        if size_bytes <= self.most_array_bytes:
            return None
        return ResourceLimitError(
            f"the arrays of {self.name} would take {format_bytes(size_bytes)} in {self.sessions} sessions, the limit "
            f"is {format_bytes(int(self.most_array_bytes))} for one person",
            remedy="release arrays or close sessions, or have the operator raise --person-memory",
        )


class People:
    """By name; who has no session is forgotten. memory_bytes: of all devices, where it is to be shared, else 0."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.memory_bytes = 0
        self._by_name: dict[str, Person] = {}

    def find(self, name: str) -> Person:
        """Who may have no session yet."""
        return self._by_name.get(name) or Person(name, self)

    def join(self, person: Person) -> Person:
        """They have a session more; returns who counts it."""
        person = self._by_name.setdefault(person.name, person)
        person.sessions += 1
        return person

    def leave(self, person: Person, array_bytes: int) -> None:
        """A session ended, with so many bytes."""
        person.sessions -= 1
        person.array_bytes -= array_bytes
        if not person.sessions:
            self._by_name.pop(person.name, None)

    def all(self) -> list[Person]:
        return list(self._by_name.values())

    def check_invariants(self, holdings: Iterable[tuple[Person, int]]) -> None:
        """Each counts the sessions that are theirs, and what these hold. holdings: of each session, whose and bytes."""
        counts, sizes = Counter[str](), Counter[str]()
        for person, size_bytes in holdings:
            assert person is self._by_name[person.name]
            counts[person.name] += 1
            sizes[person.name] += size_bytes
        assert {person.name: person.sessions for person in self.all()} == counts
        assert all(person.array_bytes == sizes[person.name] for person in self.all())
