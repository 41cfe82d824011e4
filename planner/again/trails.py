"""What searches leave behind for later ones: how each went, kept beside the plans (`again` has the use of it)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.errors import ShardwrightError
from shardwright.hlo import Module
from shardwright.planner.again.earlier import EarlierPlan
from shardwright.planner.again.messages import Messages
from shardwright.planner.digests import cluster_digest, hash_of, options_digest, outline, planner_version
from shardwright.planner.store import Store
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.found import Found, Tried

T = TypeVar("T")

#: Trails kept of one kind of question: the last ones.
MOST_TRAILS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a search is asked.

    kind: hash of what two questions must have in common for one to learn from the other: the program's steps, the
    options besides pins. sizes, cluster: hashes of the program's shapes and constants, and of the cluster.
    asked: annotations and pins.
    """

    kind: bytes
    sizes: str
    cluster: str
    asked: frozenset[str]

    @classmethod
    def of(cls, module: Module, cluster: Cluster, options: PlanOptions) -> Question:
        named = options.force if isinstance(options.force, Mapping) else {}
        pins = (*named.items(), *options.argument_axes.items(), *options.output_axes.items())
        force = None if isinstance(options.force, Mapping) else options.force
        rest = replace(options, force=force, argument_axes={}, output_axes={}, deadline_s=None)
        seen = outline(module)
        return cls(
            kind=sha256(planner_version() + options_digest(rest) + seen.steps).digest(),
            sizes=seen.sizes.hex(),
            cluster=cluster_digest(cluster).hex(),
            asked=seen.asked | {f"{what}: {pin}" for what, pin in pins},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a plan is found: on a mesh, descended from the plan on a coarser one if `start` is given.

    step_s: of the fastest one there, memory aside.
    """

    mesh: Mesh
    start: Mesh | None
    step_s: float

    @classmethod
    def of(cls, tried: Tried) -> Way:
        return cls(mesh=tried.mesh, start=tried.start.mesh if tried.start else None, step_s=tried.step_s)

    @property
    def root(self) -> Mesh:
        """The mesh that is searched outright."""
        return self.start or self.mesh

    def leads_to(self, found: Found | Tried) -> bool:
        return (found.mesh, found.start.mesh if found.start else None) == (self.mesh, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What of a program is computed otherwise: the rung of the ladder of `relief`, its length, micro-batches.

    saved: by the rung, as a part of what the last one saves.
    """

    rung: int
    rungs: int
    micro_batches: int
    saved: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds of a plan, and those that a device computes if the work is divided evenly."""

    compute_s: float
    communication_s: float
    work_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trail:
    """How a search went.

    ways: what was tried with the program as it is, fastest first. won / entry / price: of the plan. limit_bytes: what
    a device had. was_open: whether the plan's first bound left too much open.
    """

    question: Question
    ways: tuple[Way, ...]
    won: Way
    entry: Entry
    price: Price
    limit_bytes: int
    was_open: bool = False


class Trails:
    """The last trails of each kind of question, in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def best_for(self, question: Question) -> Trail | None:
        """The trail of a question with the same pins or fewer: rather of the same cluster, of the same sizes, of more
        pins, and a later one."""
        found = [trail for trail in self._of(question) if trail.question.asked <= question.asked]
        return max(found, key=lambda trail: self._rank(trail, question), default=None)

    def keep(self, trail: Trail) -> None:
        """Keep a trail, in place of one of the same question."""
        others = [each for each in self._of(trail.question) if each.question != trail.question]
        kept = [*others, trail][-MOST_TRAILS:]
        self._store.put(_key(trail.question), json.dumps([_said(each) for each in kept]).encode())

    def messages(self, trail: Trail, mesh: Mesh, outline: bytes) -> Messages | None:
        """Where the search that left a trail ended on a mesh; None where nothing is kept that can be read.
        outline: `messages.outline_of` of what is planned now."""
        return self._beside("messages", trail, mesh, outline, Messages.decode)

    def plan(self, trail: Trail, outline: bytes) -> EarlierPlan | None:
        """The plan of the search that left a trail; None as above."""
        return self._beside("plan", trail, trail.won.mesh, outline, EarlierPlan.decode)

    def keep_messages(self, question: Question, mesh: Mesh, outline: bytes, messages: Messages) -> None:
        """Keep where a search ended on a mesh, beside its trail."""
        self._keep_beside("messages", question, mesh, outline, messages.encode())

    def keep_plan(self, question: Question, outline: bytes, plan: EarlierPlan) -> None:
        """Keep the plan of a search, beside its trail."""
        self._keep_beside("plan", question, plan.mesh, outline, plan.encode())

    def _keep_beside(self, what: str, question: Question, mesh: Mesh, outline: bytes, data: bytes) -> None:
        self._store.put(_key_beside(what, question, mesh, outline), zlib.compress(data, level=1))

    def _beside(self, what: str, trail: Trail, mesh: Mesh, outline: bytes, decode: Callable[[bytes], T]) -> T | None:
        data = self._store.get(_key_beside(what, trail.question, mesh, outline))
        try:
            return None if data is None else decode(zlib.decompress(data))
        except (ValueError, TypeError, KeyError, IndexError, zlib.error):
            return None

    def _rank(self, trail: Trail, question: Question) -> tuple[bool, bool, int]:
        one = trail.question
        return one.cluster == question.cluster, one.sizes == question.sizes, len(one.asked)

    def _of(self, question: Question) -> list[Trail]:
        """The trails of a question's kind, the last one first; none where what was kept cannot be read."""
        data = self._store.get(_key(question))
        try:
            return [_read(each, question.kind) for each in json.loads(data or b"[]")]
        except (ValueError, TypeError, KeyError, ShardwrightError):
            return []


def _key(question: Question) -> bytes:
    return b"trails" + question.kind


def _key_beside(what: str, question: Question, mesh: Mesh, outline: bytes) -> bytes:
    asked = [question.sizes, question.cluster, sorted(question.asked), list(mesh.sizes.items())]
    return what.encode() + sha256(question.kind + hash_of(asked) + outline).digest()


def _said(trail: Trail) -> dict[str, Any]:
    question = trail.question
    return {
        "sizes": question.sizes,
        "cluster": question.cluster,
        "asked": sorted(question.asked),
        "ways": [_way_said(way) for way in trail.ways],
        "won": _way_said(trail.won),
        "entry": asdict(trail.entry),
        "price": asdict(trail.price),
        "limit_bytes": trail.limit_bytes,
        "was_open": trail.was_open,
    }


def _read(said: Mapping[str, Any], kind: bytes) -> Trail:
    """What `_said` says of a trail. Raises ValueError and others where it is none that a search could have left."""
    trail = Trail(
        question=Question(kind=kind, sizes=said["sizes"], cluster=said["cluster"], asked=frozenset(said["asked"])),
        ways=tuple(_way_read(way) for way in said["ways"]),
        won=_way_read(said["won"]),
        entry=Entry(**said["entry"]),
        price=Price(**said["price"]),
        limit_bytes=int(said["limit_bytes"]),
        was_open=bool(said["was_open"]),
    )
    if not trail.ways or trail.price.work_s <= 0 or not -1 <= trail.entry.rung < trail.entry.rungs:
        raise ValueError("no search leaves such a trail")
    return trail


def _way_said(way: Way) -> list[Any]:
    return [list(way.mesh.sizes.items()), list(way.start.sizes.items()) if way.start else None, way.step_s]


def _way_read(said: list[Any]) -> Way:
    mesh, start, step_s = said
    return Way(mesh=Mesh.of(dict(mesh)), start=Mesh.of(dict(start)) if start else None, step_s=float(step_s))
