"""Where message passing ended, kept and told again: of other texts, in bytes, and damaged."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import PlanError
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.cache.plan_cache import plan_with_cache
from shardwright.planner.cache.store import MemoryStore
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.graph.source import Source
from shardwright.planner.search.search import Search
from shardwright.planner.segments.segment_chain import Chain, Key
from shardwright.planner.solver.warm_start import WarmStart
from shardwright.planner.warm_start.saved_messages import SavedMessages, opcode_digest
from shardwright.planner.warm_start.search_records import SearchHistory, SearchRecord
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh
from tests.planner.programs import gpt2, lower

CLUSTER = Cluster.local(4)
MESH = Mesh.of({"data": 2, "model": 2})
OPTIONS = PlanOptions(mesh={"data": 2, "model": 2})


@cache
def text_of(batch: int = 48) -> str:
    return lower(gpt2(layers=2, batch=batch, length=32))


def chain_of(text: str) -> Chain:
    chain = Search(text, CLUSTER, OPTIONS).build_chain(MESH, ForcedStrategy(), frozenset())
    chain.warm_start = WarmStart()
    return chain


@cache
def solved() -> tuple[Chain, SavedMessages]:
    chain = chain_of(text_of())
    solution = chain.solve(20.0)
    assert chain.warm_start is not None
    return chain, SavedMessages.of(chain, chain.warm_start, solution.tied_bound)


def test_messages_come_back_from_bytes() -> None:
    _, messages = solved()
    read = SavedMessages.decode(messages.encode())
    assert (read.decisions, read.numbers, read.lower_bound_s) == (
        messages.decisions,
        messages.numbers,
        messages.lower_bound_s,
    )
    assert read.warm_start.states == messages.warm_start.states
    assert len(read.warm_start.moved) == len(messages.warm_start.moved) > 0
    for edge, ends in messages.warm_start.moved.items():
        for before, now in zip(ends, read.warm_start.moved[edge], strict=True):
            np.testing.assert_allclose(now, before, rtol=1e-6)


def test_what_is_no_message_is_refused() -> None:
    data = solved()[1].encode()
    for cut in (0, 40, -8):
        with pytest.raises((ValueError, TypeError, KeyError, IndexError)):
            SavedMessages.decode(data[:cut])


def test_the_same_program_is_told_all_that_was_known() -> None:
    chain, messages = solved()
    told = messages.to_warm_start(chain_of(text_of()))
    assert chain.warm_start is not None
    assert told.states == chain.warm_start.states
    assert set(told.moved) == set(chain.warm_start.moved)
    for edge, ends in chain.warm_start.moved.items():
        for before, now in zip(ends, told.moved[edge], strict=True):
            np.testing.assert_allclose(now, before, rtol=1e-6)


@pytest.mark.dear
def test_another_batch_begins_nearly_where_it_will_end() -> None:
    _, messages = solved()
    cold, warm = chain_of(text_of(96)), chain_of(text_of(96))
    warm.warm_start = messages.to_warm_start(warm)
    assert opcode_digest(warm.graph.flow) == opcode_digest(chain_of(text_of()).graph.flow)
    assert len(warm.warm_start.states) > 0.9 * len(warm.states())
    assert warm.solve(20.0).value == pytest.approx(cold.solve(20.0).value, rel=1e-4)


class _DamagingStore(MemoryStore):
    """A store that cuts off the ends of messages.

    damaged: how many.
    """

    damaged = 0

    def get(self, key: bytes) -> bytes | None:
        value = super().get(key)
        if value is None or not key.startswith(b"messages"):
            return value
        self.damaged += 1
        return value[:-20]


@pytest.mark.dear
def test_damaged_messages_cost_time_and_no_plan() -> None:
    store = _DamagingStore()
    plan(text_of(), CLUSTER, OPTIONS, history=SearchHistory(store))
    again = plan(text_of(96), CLUSTER, OPTIONS, history=SearchHistory(store))
    assert store.damaged
    assert again.instructions == plan(text_of(96), CLUSTER, OPTIONS).instructions


class _SourceReadOnce(Source):
    """A text that is no HLO any more once it was read."""

    @property
    def module(self) -> Module:
        module = super().module
        self.text = "read already"
        return module


@pytest.mark.dear
def test_a_text_is_read_once_a_call() -> None:
    source, options = _SourceReadOnce(text_of()), PlanOptions(mesh=OPTIONS.mesh, stages=1)
    step_plan = plan_with_cache(source, CLUSTER, options, store=MemoryStore())
    assert isinstance(step_plan, Plan)
    assert step_plan.instructions == plan(text_of(), CLUSTER, options).instructions


class _ContradictedMessages(SavedMessages):
    """Messages about decisions of which the current program's pins leave none."""

    def to_warm_start(self, chain: Chain) -> WarmStart[Key]:
        raise ValueError("no assignment is finite")


class _ContradictedHistory(SearchHistory):
    def load_messages(self, record: SearchRecord, mesh: Mesh, outline: bytes) -> SavedMessages | None:
        messages = super().load_messages(record, mesh, outline)
        assert messages is not None
        return _ContradictedMessages(**{field.name: getattr(messages, field.name) for field in fields(messages)})


@pytest.mark.dear
def test_pins_that_contradict_each_other_are_said_as_from_nothing() -> None:
    history = _ContradictedHistory(MemoryStore())
    plan(text_of(), CLUSTER, OPTIONS, history=history)
    with pytest.raises(PlanError, match="contradict"):
        plan(text_of(96), CLUSTER, OPTIONS, history=history)
