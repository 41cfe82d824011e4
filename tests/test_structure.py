"""Files of a room can be read one by one: no large circles of imports, no classes that do everything."""

from __future__ import annotations

import importlib
import inspect

import pytest

from scripts.import_graph import (
    count_public_methods,
    find_circles,
    list_modules,
    read_imports,
    select_room,
)
from shardwright.planner.cache.keys import SOURCES

#: Files in the largest circle of imports, type-only ones counted. Only ever lowered.
LARGEST_CIRCLE = {"client": 4, "server": 1}

#: Public methods and properties of a class, at most, in these rooms.
MOST_METHODS = 25

#: Lines of classes that have grown before.
MOST_LINES = {"client.step.Step": 350, "client.session_state.SessionState": 150}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert find_circles({name: frozenset(targets) for name, targets in graph.items()}) == [["a", "b", "c"], ["d", "e"]]


def test_imports_for_types_and_in_functions_count() -> None:
    imports = read_imports()
    assert "shardwright.client.session" in imports["shardwright"]
    assert "shardwright.client.step" in imports["shardwright.client.session"]
    assert "shardwright.server.master.events" in imports["shardwright.server.master.service"]


def test_links_are_followed_once() -> None:
    modules = list_modules()
    assert modules["shardwright.server.run"].exists()
    assert len({path.resolve() for path in modules.values()}) == len(modules)


@pytest.mark.parametrize("room", LARGEST_CIRCLE)
def test_circles_of_imports_are_small(room: str) -> None:
    circles = find_circles(select_room(read_imports(), room))
    assert [circle for circle in circles if len(circle) > LARGEST_CIRCLE[room]] == []


@pytest.mark.parametrize("room", LARGEST_CIRCLE)
def test_classes_are_small(room: str) -> None:
    counts = count_public_methods(select_room(read_imports(), room))
    named = {name.removeprefix("shardwright."): count for name, count in counts.items()}
    assert {name: count for name, count in named.items() if count > MOST_METHODS} == {}


@pytest.mark.parametrize("name", MOST_LINES)
def test_classes_that_grew_stay_short(name: str) -> None:
    module, _, class_name = f"shardwright.{name}".rpartition(".")
    lines = inspect.getsource(getattr(importlib.import_module(module), class_name)).splitlines()
    assert len(lines) <= MOST_LINES[name]


#: Imported by the planner, without a say in what it plans.
_WITHOUT_A_SAY = {
    "errors", "input_files", "json_reader", "package", "processes", "progress", "spelling", "tuning", "units", "xla",
}  # fmt: skip


def test_whatever_the_planner_imports_makes_it_another_planner() -> None:
    graph = read_imports()
    reached, news = set[str](), {module for module in graph if module.startswith("shardwright.planner")}
    while news:
        reached |= news
        news = {other for module in news for other in graph[module]} - reached
    rooms = {module.split(".")[1] for module in reached if "." in module}
    assert rooms - {source.removesuffix(".py") for source in SOURCES} - _WITHOUT_A_SAY == set()
