"""Programs and plans are kept once, by content, for as long as a session holds them."""

from __future__ import annotations

import asyncio

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import PlanError, ResourceLimitError
from shardwright.server.limits import Limits
from shardwright.server.master import events as ev
from shardwright.server.master.content_store import ContentStore
from shardwright.server.master.programs import StoredProgram
from shardwright.server.master.shell import Master


def test_an_item_lives_as_long_as_a_session_holds_it() -> None:
    shelf: ContentStore[str] = ContentStore("program", 8)
    shelf.put("first", "p", "text")
    assert shelf.hold("second", "p") == "text"
    shelf.drop_session("first")
    assert shelf.get("second", "p") == "text"
    with pytest.raises(PlanError, match="no program p in this session"):
        shelf.get("first", "p")
    shelf.drop_session("second")
    assert not shelf.is_held("p")
    assert shelf.hold("third", "p") is None


def test_a_session_holds_so_many_items() -> None:
    shelf: ContentStore[str] = ContentStore("program", 2)
    for item in ("a", "b", "a"):  # again is not more
        shelf.put("s", item, item)
    with pytest.raises(ResourceLimitError, match="holds 2 programs"):
        shelf.put("s", "c", "c")
    shelf.put("other", "c", "c")


def test_the_master_forgets_what_a_closed_session_brought() -> None:
    async def scenario() -> Master:
        master = Master(Cluster.local(2), Limits(), wait_s=10.0)
        master.call(lambda number: ev.SessionRequested(call=number, session_id="s"))
        program = StoredProgram(program_id="p", gzip=b"", text_bytes=0)
        master.programs.put("s", "p", program)
        await master.call(lambda number: ev.SessionClosed(call=number, session_id="s")).answer()
        await master.close("the test is over")
        return master

    assert not asyncio.run(scenario()).programs.is_held("p")
