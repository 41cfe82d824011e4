"""Records of searches, stored beside the plans (used by `replanning`)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from shardwright.clusters.cluster import Cluster
from shardwright.errors import ShardwrightError
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.cache.keys import build_outline, cluster_digest, hash_json, options_digest, planner_version
from shardwright.planner.cache.store import Store
from shardwright.planner.tuning import MAX_RECORDS
from shardwright.planner.warm_start.earlier_plan import EarlierPlan
from shardwright.planner.warm_start.saved_messages import SavedMessages
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.solutions import CandidatePlan, MeshSolution

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    """The question of a search.

    kind: hash of the parts two related queries share: the program's steps, and the options besides pins.
    sizes: hash of the program's shapes and constants.
    cluster: hash of the cluster.
    pins: annotations and pins.
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
    """The origin of a plan: a mesh, optionally refined from a coarser one.

    mesh: the plan's mesh.
    coarse_mesh: the mesh it was refined from, if any.
    step_s: step of the fastest plan there, memory aside.
    """

    mesh: Mesh
    coarse_mesh: Mesh | None
    step_s: float

    @classmethod
    def of(cls, solution: MeshSolution) -> MeshRecord:
        return cls(
            mesh=solution.mesh,
            coarse_mesh=solution.coarse_solution.mesh if solution.coarse_solution else None,
            step_s=solution.step_s,
        )

    @property
    def searched_mesh(self) -> Mesh:
        """The mesh searched outright."""
        return self.coarse_mesh or self.mesh

    def matches(self, plan: CandidatePlan | MeshSolution) -> bool:
        return (plan.mesh, plan.coarse_solution.mesh if plan.coarse_solution else None) == (
            self.mesh,
            self.coarse_mesh,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RematChoice:
    """A variant of the program: rematerialization and micro-batches.

    rung: level of the ladder in `memory_tradeoffs`.
    rungs: length of the ladder.
    micro_batches: their number.
    saved: saved bytes relative to the last rung's.
    """

    rung: int
    rungs: int
    micro_batches: int
    saved: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCost:
    """Cost of a plan in seconds; work_s: compute per device under even division."""

    compute_s: float
    communication_s: float
    work_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """The course of a search.

    query: its question.
    mesh_records: solutions of the unchanged program, fastest first.
    winner / remat_choice / cost: of the plan.
    limit_bytes: memory limit of a device.
    missed_target_gap: whether the plan's first bound left too large a gap.
    """

    query: SearchQuery
    mesh_records: tuple[MeshRecord, ...]
    winner: MeshRecord
    remat_choice: RematChoice
    cost: RecordedCost
    limit_bytes: int
    missed_target_gap: bool = False


class SearchHistory:
    """The latest records of each kind of query, in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find_best(self, question: SearchQuery) -> SearchRecord | None:
        """The record of a query with the same or fewer pins; preferred in order: same cluster, same sizes, more pins,
        later."""
        records = [record for record in self._records_for(question) if record.query.pins <= question.pins]
        return max(records, key=lambda record: self._rank(record, question), default=None)

    def save(self, record: SearchRecord) -> None:
        """Save a record, replacing one of the same query."""
        others = [each for each in self._records_for(record.query) if each.query != record.query]
        records = [*others, record][-MAX_RECORDS:]
        self._store.put(_key(record.query), json.dumps([_to_json(record) for record in records]).encode())

    def load_messages(self, record: SearchRecord, mesh: Mesh, outline: bytes) -> SavedMessages | None:
        """Final messages on a mesh from the record's search; None when absent or unreadable.

        outline: `saved_messages.opcode_digest` of the current program.
        """
        return self._load_attachment("messages", record, mesh, outline, SavedMessages.decode)

    def load_plan(self, record: SearchRecord, outline: bytes) -> EarlierPlan | None:
        """The plan of the record's search; None when absent or unreadable."""
        return self._load_attachment("plan", record, record.winner.mesh, outline, EarlierPlan.decode)

    def save_messages(self, question: SearchQuery, mesh: Mesh, outline: bytes, messages: SavedMessages) -> None:
        """Save a search's final messages on a mesh, beside its record."""
        self._save_attachment("messages", question, mesh, outline, messages.encode())

    def save_plan(self, question: SearchQuery, outline: bytes, plan: EarlierPlan) -> None:
        """Save the plan of a search, beside its record."""
        self._save_attachment("plan", question, plan.mesh, outline, plan.encode())

    def _save_attachment(self, what: str, question: SearchQuery, mesh: Mesh, outline: bytes, data: bytes) -> None:
        self._store.put(_attachment_key(what, question, mesh, outline), zlib.compress(data, level=1))

    def _load_attachment(
        self, what: str, record: SearchRecord, mesh: Mesh, outline: bytes, decode: Callable[[bytes], T]
    ) -> T | None:
        data = self._store.get(_attachment_key(what, record.query, mesh, outline))
        try:
            return None if data is None else decode(zlib.decompress(data))
        except (ValueError, TypeError, KeyError, IndexError, zlib.error):
            return None

    def _rank(self, record: SearchRecord, question: SearchQuery) -> tuple[bool, bool, int]:
        one = record.query
        return one.cluster == question.cluster, one.sizes == question.sizes, len(one.pins)

    def _records_for(self, question: SearchQuery) -> list[SearchRecord]:
        """Records of a query's kind, the last one first; none when unreadable."""
        data = self._store.get(_key(question))
        try:
            return [_from_json(entry, question.kind) for entry in json.loads(data or b"[]")]
        except (ValueError, TypeError, KeyError, ShardwrightError):
            return []


def _key(question: SearchQuery) -> bytes:
    return b"history" + question.kind


def _attachment_key(what: str, question: SearchQuery, mesh: Mesh, outline: bytes) -> bytes:
    asked = [question.sizes, question.cluster, sorted(question.pins), list(mesh.sizes.items())]
    return what.encode() + sha256(question.kind + hash_json(asked) + outline).digest()


def _to_json(record: SearchRecord) -> dict[str, Any]:
    question = record.query
    return {
        "sizes": question.sizes,
        "cluster": question.cluster,
        "asked": sorted(question.pins),
        "ways": [_mesh_record_to_json(way) for way in record.mesh_records],
        "won": _mesh_record_to_json(record.winner),
        "entry": asdict(record.remat_choice),
        "price": asdict(record.cost),
        "limit_bytes": record.limit_bytes,
        "was_open": record.missed_target_gap,
    }


def _from_json(content: Mapping[str, Any], kind: bytes) -> SearchRecord:
    """The record encoded by `_to_json`. Raises ValueError and others on data no search could have saved."""
    record = SearchRecord(
        query=SearchQuery(
            kind=kind, sizes=content["sizes"], cluster=content["cluster"], pins=frozenset(content["asked"])
        ),
        mesh_records=tuple(_mesh_record_from_json(way) for way in content["ways"]),
        winner=_mesh_record_from_json(content["won"]),
        remat_choice=RematChoice(**content["entry"]),
        cost=RecordedCost(**content["price"]),
        limit_bytes=int(content["limit_bytes"]),
        missed_target_gap=bool(content["was_open"]),
    )
    if (
        not record.mesh_records
        or record.cost.work_s <= 0
        or not -1 <= record.remat_choice.rung < record.remat_choice.rungs
    ):
        raise ValueError("no search leaves such a record")
    return record


def _mesh_record_to_json(way: MeshRecord) -> list[Any]:
    return [list(way.mesh.sizes.items()), list(way.coarse_mesh.sizes.items()) if way.coarse_mesh else None, way.step_s]


def _mesh_record_from_json(content: list[Any]) -> MeshRecord:
    mesh, start, step_s = content
    return MeshRecord(
        mesh=Mesh.of(dict(mesh)), coarse_mesh=Mesh.of(dict(start)) if start else None, step_s=float(step_s)
    )
