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
from shardwright.planner.cache.keys import build_outline, cluster_digest, hash_json, options_digest, planner_version
from shardwright.planner.cache.store import Store
from shardwright.planner.warm_start.earlier_plan import EarlierPlan
from shardwright.planner.warm_start.saved_messages import SavedMessages
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.solutions import CandidatePlan, MeshSolution

T = TypeVar("T")

#: Trails kept of one kind of question: the last ones.
MAX_RECORDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    """What a search is asked.

    kind: hash of what two questions must have in common for one to learn from the other: the program's steps, the
    options besides pins. sizes, cluster: hashes of the program's shapes and constants, and of the cluster.
    asked: annotations and pins.
    """

    kind: bytes
    sizes: str
    cluster: str
    pins: frozenset[str]

    @classmethod
    def of(cls, module: Module, cluster: Cluster, options: PlanOptions) -> SearchQuery:
        named = options.force if isinstance(options.force, Mapping) else {}
        pins = (*named.items(), *options.argument_axes.items(), *options.output_axes.items())
        force = None if isinstance(options.force, Mapping) else options.force
        rest = replace(options, force=force, argument_axes={}, output_axes={}, deadline_s=None)
        seen = build_outline(module)
        return cls(
            kind=sha256(planner_version() + options_digest(rest) + seen.steps).digest(),
            sizes=seen.sizes.hex(),
            cluster=cluster_digest(cluster).hex(),
            pins=seen.pins | {f"{what}: {pin}" for what, pin in pins},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRecord:
    """How a plan is found: on a mesh, descended from the plan on a coarser one if `start` is given.

    step_s: of the fastest one there, memory aside.
    """

    mesh: Mesh
    coarse_mesh: Mesh | None
    step_s: float

    @classmethod
    def of(cls, tried: MeshSolution) -> MeshRecord:
        return cls(
            mesh=tried.mesh,
            coarse_mesh=tried.coarse_solution.mesh if tried.coarse_solution else None,
            step_s=tried.step_s,
        )

    @property
    def searched_mesh(self) -> Mesh:
        """The mesh that is searched outright."""
        return self.coarse_mesh or self.mesh

    def matches(self, found: CandidatePlan | MeshSolution) -> bool:
        return (found.mesh, found.coarse_solution.mesh if found.coarse_solution else None) == (
            self.mesh,
            self.coarse_mesh,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RematChoice:
    """What of a program is computed otherwise: the rung of the ladder of `relief`, its length, micro-batches.

    saved: by the rung, as a part of what the last one saves.
    """

    rung: int
    rungs: int
    micro_batches: int
    saved: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCost:
    """Seconds of a plan, and those that a device computes if the work is divided evenly."""

    compute_s: float
    communication_s: float
    work_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """How a search went.

    ways: what was tried with the program as it is, fastest first. won / entry / price: of the plan. limit_bytes: what
    a device had. was_open: whether the plan's first bound left too much open.
    """

    query: SearchQuery
    mesh_records: tuple[MeshRecord, ...]
    winner: MeshRecord
    remat_choice: RematChoice
    cost: RecordedCost
    limit_bytes: int
    missed_target_gap: bool = False


class SearchHistory:
    """The last trails of each kind of question, in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find_best(self, question: SearchQuery) -> SearchRecord | None:
        """The trail of a question with the same pins or fewer: rather of the same cluster, of the same sizes, of more
        pins, and a later one."""
        found = [trail for trail in self._records_for(question) if trail.query.pins <= question.pins]
        return max(found, key=lambda trail: self._rank(trail, question), default=None)

    def save(self, trail: SearchRecord) -> None:
        """Keep a trail, in place of one of the same question."""
        others = [each for each in self._records_for(trail.query) if each.query != trail.query]
        kept = [*others, trail][-MAX_RECORDS:]
        self._store.put(_key(trail.query), json.dumps([_to_json(each) for each in kept]).encode())

    def load_messages(self, trail: SearchRecord, mesh: Mesh, outline: bytes) -> SavedMessages | None:
        """Where the search that left a trail ended on a mesh; None where nothing is kept that can be read.
        outline: `messages.opcode_digest` of what is planned now."""
        return self._load_attachment("messages", trail, mesh, outline, SavedMessages.decode)

    def load_plan(self, trail: SearchRecord, outline: bytes) -> EarlierPlan | None:
        """The plan of the search that left a trail; None as above."""
        return self._load_attachment("plan", trail, trail.winner.mesh, outline, EarlierPlan.decode)

    def save_messages(self, question: SearchQuery, mesh: Mesh, outline: bytes, messages: SavedMessages) -> None:
        """Keep where a search ended on a mesh, beside its trail."""
        self._save_attachment("messages", question, mesh, outline, messages.encode())

    def save_plan(self, question: SearchQuery, outline: bytes, plan: EarlierPlan) -> None:
        """Keep the plan of a search, beside its trail."""
        self._save_attachment("plan", question, plan.mesh, outline, plan.encode())

    def _save_attachment(self, what: str, question: SearchQuery, mesh: Mesh, outline: bytes, data: bytes) -> None:
        self._store.put(_attachment_key(what, question, mesh, outline), zlib.compress(data, level=1))

    def _load_attachment(
        self, what: str, trail: SearchRecord, mesh: Mesh, outline: bytes, decode: Callable[[bytes], T]
    ) -> T | None:
        data = self._store.get(_attachment_key(what, trail.query, mesh, outline))
        try:
            return None if data is None else decode(zlib.decompress(data))
        except (ValueError, TypeError, KeyError, IndexError, zlib.error):
            return None

    def _rank(self, trail: SearchRecord, question: SearchQuery) -> tuple[bool, bool, int]:
        one = trail.query
        return one.cluster == question.cluster, one.sizes == question.sizes, len(one.pins)

    def _records_for(self, question: SearchQuery) -> list[SearchRecord]:
        """The trails of a question's kind, the last one first; none where what was kept cannot be read."""
        data = self._store.get(_key(question))
        try:
            return [_from_json(each, question.kind) for each in json.loads(data or b"[]")]
        except (ValueError, TypeError, KeyError, ShardwrightError):
            return []


def _key(question: SearchQuery) -> bytes:
    return b"trails" + question.kind


def _attachment_key(what: str, question: SearchQuery, mesh: Mesh, outline: bytes) -> bytes:
    asked = [question.sizes, question.cluster, sorted(question.pins), list(mesh.sizes.items())]
    return what.encode() + sha256(question.kind + hash_json(asked) + outline).digest()


def _to_json(trail: SearchRecord) -> dict[str, Any]:
    question = trail.query
    return {
        "sizes": question.sizes,
        "cluster": question.cluster,
        "asked": sorted(question.pins),
        "ways": [_mesh_record_to_json(way) for way in trail.mesh_records],
        "won": _mesh_record_to_json(trail.winner),
        "entry": asdict(trail.remat_choice),
        "price": asdict(trail.cost),
        "limit_bytes": trail.limit_bytes,
        "was_open": trail.missed_target_gap,
    }


def _from_json(said: Mapping[str, Any], kind: bytes) -> SearchRecord:
    """What `_to_json` says of a trail. Raises ValueError and others where it is none that a search could have left."""
    trail = SearchRecord(
        query=SearchQuery(kind=kind, sizes=said["sizes"], cluster=said["cluster"], pins=frozenset(said["asked"])),
        mesh_records=tuple(_mesh_record_from_json(way) for way in said["ways"]),
        winner=_mesh_record_from_json(said["won"]),
        remat_choice=RematChoice(**said["entry"]),
        cost=RecordedCost(**said["price"]),
        limit_bytes=int(said["limit_bytes"]),
        missed_target_gap=bool(said["was_open"]),
    )
    if not trail.mesh_records or trail.cost.work_s <= 0 or not -1 <= trail.remat_choice.rung < trail.remat_choice.rungs:
        raise ValueError("no search leaves such a trail")
    return trail


def _mesh_record_to_json(way: MeshRecord) -> list[Any]:
    return [list(way.mesh.sizes.items()), list(way.coarse_mesh.sizes.items()) if way.coarse_mesh else None, way.step_s]


def _mesh_record_from_json(said: list[Any]) -> MeshRecord:
    mesh, start, step_s = said
    return MeshRecord(
        mesh=Mesh.of(dict(mesh)), coarse_mesh=Mesh.of(dict(start)) if start else None, step_s=float(step_s)
    )
