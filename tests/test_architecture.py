"""ARCHITECTURE.md is true: files that it names exist, every folder is named, and its pictures are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.draw_architecture import FOLDER, PICTURES, STEP, WORDS, arrange, keep_needed, read_rooms
from scripts.import_graph import PACKAGE, ROOT, list_modules

TEXT = (ROOT / "ARCHITECTURE.md").read_text()

#: Folders that need no words: what is in them is generated, or has the name of what it is in.
UNNAMED = {"shardwright/proto/v1"}


def folders() -> list[str]:
    """Folders of the product as the document calls them."""
    inits = [path for path in list_modules().values() if path.stem == "__init__" and path.parent.name != PACKAGE]
    return sorted({path.parent.resolve().relative_to(ROOT).as_posix() for path in inits} - UNNAMED)


@pytest.mark.parametrize("folder", folders())
def test_every_folder_is_named(folder: str) -> None:
    assert f"`{folder}/" in TEXT or f"`{folder}`" in TEXT


def blocks() -> list[str]:
    """Rows of tables, and paragraphs."""
    return [block for part in TEXT.split("\n\n") for block in (part.splitlines() if part.startswith("|") else [part])]


@pytest.mark.parametrize("block", [block for block in blocks() if ".py`" in block], ids=lambda block: block[:40])
def test_files_named_without_their_folder_lie_in_one_named_beside_them(block: str) -> None:
    names = re.findall(r"`([\w/-]+(?:\.py|/))`", block)
    beside = [ROOT / (name if name.endswith("/") else Path(name).parent) for name in names if "/" in name]
    short = [name for name in names if "/" not in name]
    assert [name for name in short if not any(list(folder.rglob(name)) for folder in beside)] == []


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == PICTURES[name](), "python scripts/draw_architecture.py"
    assert f"(docs/architecture/{name})" in TEXT


def test_all_rooms_are_drawn_above_what_they_import() -> None:
    rooms = read_rooms()
    rows = arrange(rooms)
    assert sorted(room for row in rows for room in row) == sorted(WORDS)
    level = {room: number for number, row in enumerate(rows) for room in row}
    assert all(level[room] < level[other] for room, others in rooms.items() for other in others)
    folders = {path.parent.name for path in ROOT.joinpath(PACKAGE).glob("*/__init__.py")}
    assert folders <= set(WORDS)


def test_arrows_that_others_make_already_are_left_out() -> None:
    assert keep_needed({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_files_on_a_steps_way_exist() -> None:
    assert [file for *_, file in STEP if not (ROOT / file).exists()] == []
