"""Pictures of ARCHITECTURE.md: the rooms and who imports whom, and a step's way. Written to docs/architecture/.

    python scripts/draw_architecture.py    # after a room came, went, or imports another one

An arrow between rooms is an import in their files, type-only ones too, left out where others lead there as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.import_graph import PACKAGE, list_modules, read_imports  # noqa: E402

FOLDER = ROOT / "docs" / "architecture"

#: A folder of the package → what is in it, in a line.
WORDS = {
    "cli": "the command line",
    "horovod": "Horovod's names",
    "ranks": "processes that train together",
    "client": "a function becomes HLO text",
    "server": "master, workers, executors",
    "launch": "starts ranks and servers",
    "protocol": "messages as values",
    "planner": "HLO text becomes a plan",
    "builders": "strategies of variables",
    "explicit": "a plan in JAX's types",
    "report": "a plan in words",
    "xla": "a plan becomes a program",
    "cost": "seconds and bytes",
    "plans": "plans as values",
    "attention": "attention as one operator",
    "kernels": "rules, prices, parts of kernels",
    "placements": "what lies on the host",
    "regions": "borders of manual regions",
    "hlo": "HLO text as values",
    "options": "what users ask for",
    "tasks": "lists of a pipeline's tasks",
    "clusters": "nodes and links",
    "checkpoints": "files of arrays",
    "proto": "generated messages",
}

#: The way of a step: who, to whom (the same: what it does), what, and where in the code.
STEP = (
    ("client", "client", "binds arguments, numbers the step", "client/step.py"),
    ("client", "executor", "large arguments, as slices", "client/transfer.py"),
    ("client", "master", "step 7: ids, small arguments", "client/stream.py"),
    ("master", "master", "admits it in order of numbers", "server/master/dispatch.py"),
    ("master", "executor", "the same command to every node", "server/master/shell.py"),
    ("executor", "executor", "runs the program, keeps results", "server/runtime/executor.py"),
    ("executor", "executor", "collectives with other nodes", "server/runtime/transport.py"),
    ("executor", "master", "done, or an error", "server/worker/executor.py"),
    ("master", "master", "waits for all nodes", "server/master/answers.py"),
    ("master", "client", "reply 7: scalars, times", "server/master/service.py"),
    ("client", "client", "results are handles", "client/arrays.py"),
    ("executor", "client", "contents, where they are fetched", "server/runtime/transfer_service.py"),
)

_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">\n'
    '<rect width="100%" height="100%" fill="#ffffff"/>\n'
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#607080"/></marker></defs>\n'
)
_LINE = 'stroke="#607080" fill="none" marker-end="url(#tip)"'

Rooms = dict[str, set[str]]


def read_rooms() -> Rooms:
    """Of each folder of the package, the folders that its files import."""
    modules, imports = list_modules(), read_imports()
    rooms: Rooms = {}
    for module, targets in imports.items():
        if (room := _room_of(module, modules)) is not None:
            others = {other for target in targets if (other := _room_of(target, modules)) is not None}
            rooms.setdefault(room, set()).update(others - {room})
    return rooms


def _room_of(module: str, modules: Mapping[str, Path]) -> str | None:
    first = ".".join(module.split(".")[:2])
    is_folder = first != PACKAGE and first in modules and modules[first].stem == "__init__"
    return first.removeprefix(f"{PACKAGE}.") if is_folder else None


def keep_needed(rooms: Rooms) -> Rooms:
    """Without the arrows that others make already: what is imported is reached another way, too."""

    def reach(room: str) -> set[str]:
        return rooms[room].union(*(reach(other) for other in rooms[room]))

    return {room: {o for o in others if not any(o in reach(p) for p in others - {o})} for room, others in rooms.items()}


def arrange(rooms: Rooms) -> list[list[str]]:
    """Rows from the top: a room is above all that it imports, next to those that it has arrows with."""

    def height(room: str) -> int:
        return 1 + max((height(other) for other in rooms[room]), default=0)

    needed, place = keep_needed(rooms), dict[str, float]()
    rows: list[list[str]] = [[] for _ in range(max(map(height, rooms)))]
    for room in sorted(rooms):
        rows[-height(room)].append(room)
    for row in rows:
        over = {room: [place[other] for other in place if room in needed[other]] for room in row}
        means = {room: sum(places) / len(places) if places else 0.5 for room, places in over.items()}
        row.sort(key=lambda room: (means[room], room))
        place |= {room: (column + 0.5) / len(row) for column, room in enumerate(row)}
    return rows


def draw_rooms() -> str:
    """The rooms as boxes in rows, with arrows to what they import."""
    rooms = read_rooms()
    needed, rows = keep_needed(rooms), arrange(rooms)
    width, box_width, box_height, gap = 1000, 200, 44, 40
    height = len(rows) * (box_height + gap) + gap
    place: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        for column, room in enumerate(row):
            place[room] = (column + 0.5) * width / len(row), gap + number * (box_height + gap)
    lines = [_HEAD.format(width=width, height=height)]
    for room in sorted(rooms):
        for other in sorted(needed[room]):
            (x, y), (to_x, to_y) = place[room], place[other]
            bend = (to_y - y - box_height) / 2
            start, end = f"{x:.0f},{y + box_height:.0f}", f"{to_x:.0f},{to_y:.0f}"
            middle = f"{x:.0f},{y + box_height + bend:.0f} {to_x:.0f},{to_y - bend:.0f}"
            lines.append(f'<path d="M{start} C{middle} {end}" {_LINE}/>\n')
    for room, (x, y) in place.items():
        lines.append(
            f'<rect x="{x - box_width / 2:.0f}" y="{y:.0f}" width="{box_width}" height="{box_height}" rx="6" '
            f'fill="#eef3f8" stroke="#405060"/>\n<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle" '
            f'font-weight="bold">{room}/</text>\n<text x="{x:.0f}" y="{y + 35:.0f}" text-anchor="middle" '
            f'font-size="12">{escape(WORDS[room])}</text>\n'
        )
    return "".join([*lines, "</svg>\n"])


def draw_step() -> str:
    """A step's messages between client, master and executors, from the top down."""
    lanes = {"client": 170.0, "master": 500.0, "executor": 830.0}
    titles = {"client": "client", "master": "master", "executor": "executor (one a node)"}
    row_height, top = 50, 60
    height = top + row_height * len(STEP) + 20
    lines = [_HEAD.format(width=1000, height=height)]
    for lane, x in lanes.items():
        lines.append(
            f'<text x="{x:.0f}" y="26" text-anchor="middle" font-weight="bold">{titles[lane]}</text>\n'
            f'<line x1="{x:.0f}" y1="38" x2="{x:.0f}" y2="{height - 10}" stroke="#c0c8d0" stroke-width="2"/>\n'
        )
    for number, (source, target, what, file) in enumerate(STEP):
        lines += _draw_message(lanes[source], lanes[target], top + number * row_height + 20, what, file)
    return "".join([*lines, "</svg>\n"])


def _draw_message(x: float, to_x: float, y: float, what: str, file: str) -> Iterator[str]:
    middle = (x + to_x) / 2
    if x == to_x:
        yield f'<circle cx="{x:.0f}" cy="{y:.0f}" r="5" fill="#405060"/>\n'
        for text_y, text in ((y - 10, what), (y + 18, file)):
            yield _draw_text(x, text_y, text, is_file=text == file)
        return
    yield f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{to_x:.0f}" y2="{y:.0f}" {_LINE}/>\n'
    if abs(to_x - x) > 400:  # beside the lane that it crosses
        middle = (min(x, to_x) + middle) / 2
    yield _draw_text(middle, y - 6, what, is_file=False)
    yield _draw_text(middle, y + 14, file, is_file=True)


def _draw_text(x: float, y: float, text: str, *, is_file: bool) -> str:
    style = 'font-family="monospace" font-size="11" fill="#506070"' if is_file else 'fill="#102030"'
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" paint-order="stroke" stroke="#ffffff" stroke-width="4" '
        f"{style}>{escape(text)}</text>\n"
    )


PICTURES = {"rooms.svg": draw_rooms, "step.svg": draw_step}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
        print(FOLDER / name)


if __name__ == "__main__":
    main()
