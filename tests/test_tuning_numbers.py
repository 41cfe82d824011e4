"""Numbers that tune stand in one file per package, `tuning.py` or `limits.py`, each with what it buys."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from scripts.import_graph import PACKAGE, list_modules

#: Files of numbers. `client/tuning.py` is `shardwright tune`.
FILES = ("tuning", "limits")
OTHERWISE_NAMED = {"client.tuning"}

#: Numbers that may stand elsewhere, and why: they say what something means or what others do, and are not chosen.
MEANINGS = {
    "sizes of blocks that a kernel of JAX's is asked for, which say what it can be split into": (
        "kernels.ragged.DEPTH", "kernels.ragged.SIDE",
    ),
    "how much a message, an error, a report or a drawing shows": (
        "*._EXCERPT", "*._LISTED", "*._MAX_LINES", "*._MAX_LISTED", "*._MAX_MESSAGE", "*._MAX_NAMED",
        "*._MAX_OBJECTION", "*._MAX_REPORTED", "*._NAMED", "*._NAMES_SHOWN", "*._SHOWN", "*._SHOWN_FRAMES", "report.*",
        "cli.status_view._NAME_LETTERS", "cli.verify._MIN_WIDTH", "launch.node._LAST_LINES",
        "planner.memory.messages._ROUNDING_MARGIN", "tasks.graphviz.*",
    ),
    "codes, ports, digits, versions and field numbers": (
        "*.EXIT_*", "*.DEFAULT_PORT", "*._DEFAULT_PORT", "*._REFUSED", "client.frontends.torch.lowerings.*",
        "client.tls.*", "launch.ssh._PROBE_PORT", "log_lines.*_DIGITS", "planner.cache.store._DIGEST_BYTES",
        "planner.strategies.relaxed_strategies._IDLE", "planner.strategies.relaxed_strategies._SUM",
        "planner.strategies.relaxed_strategies._FIRST", "protocol.chunked_messages.*", "protocol.session_secrets.*",
        "ranks.agreement._HEADER", "ranks.launchers_cloud.*_PORT", "ranks.slurm._FIRST_SPECIAL_STEP",
        "server.master.planner_child.LOWEST_PRIORITY", "server.master.programs._GZIP",
        "server.master.statistics.*_BOUNDS_S", "server.master.store.*",
        "server.runtime.transport.*_BITS", "server.worker.exit_codes.*", "xla.formats._*",
        "xla.host_layouts._*",
    ),
    "what a program, a file, a message or an option may hold": (
        "checkpoints.directories.MAX_STEP", "client.checkpoints._MAX_KEPT", "client.datasets._MAX_*",
        "clusters.access_tokens.MIN_TOKEN_LETTERS", "clusters.cluster.MAX_CLUSTER_DEVICES", "clusters.yaml_text._MAX_*",
        "hlo.*", "json_reader.LARGEST_INTEGER", "launch.settings._MAX_SIZE", "object_codec._MAX_DEPTH",
        "options.plan_options.MAX_MESH_AXES", "plans.plan.TEXT_LIMIT_BYTES", "protocol.wire.*",
        "server.runtime.datasets.functions.MAX_PREFETCH", "server.runtime.datasets.worker.MAX_ROWS",
    ),
    "what XLA and devices do, followed here": (
        "cost.attention._BACKWARD_WORK", "cost.moves.relayout._MIN_JOINED_BYTES", "cost.peak.*",
        "planner.costs.traffic._LONGEST_ROW",
        "planner.rules.linear.XLA_KEEPS_SUMS", "server.runtime.incoming_arrays.ALIGNMENT_BYTES",
        "xla.compilers.GPUS_PER_NODE",
    ),
    "no number but all, none, or what rounding leaves": (
        "planner.costs.relaxed_prices._LARGE", "planner.costs.relaxed_prices._MIN_ELEMENTS",
        "planner.costs.relaxed_prices._ROUNDING", "planner.costs.traffic._READ", "planner.costs.traffic._NOT_READ",
        "planner.pipeline.pipeline_plan._ALL", "planner.rewrites.top_k._FOUND", "planner.solver.solve._ALL",
        "planner.strategies.relaxed_strategies._MAX_CODE",
    ),
    "points that order equal plans, and mean nothing apart": ("planner.strategies.tie_break._*",),
    "a file that is sent to hosts by itself": ("launch.node_agent.*",),
}  # fmt: skip


def _names(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _are_numbers(node: ast.expr) -> bool:
    """Whether a value is a number, or a tuple of numbers; whole ones below two alone are places and signs."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    values = [ast.unparse(part) for part in parts]
    if not values or any(re.search(r"[^-+*/<\d.e_() ]", value) for value in values):
        return False
    return any(value not in ("-2", "-1", "0", "1") for value in values)


@cache
def _numbers() -> dict[str, Path]:
    """Numbers at the top of modules that are no files of numbers, as `client.stream.STEPS_AHEAD`."""
    numbers = {}
    for module, path in list_modules().items():
        name = module.removeprefix(f"{PACKAGE}.")
        if (path.stem in FILES and name not in OTHERWISE_NAMED) or ".proto." in module:
            continue
        text = path.read_text()
        if not re.search(r"^_?[A-Z][\w, ]*(: [\w\[\], .]+)? = [-\d(]", text, re.MULTILINE):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _are_numbers(node.value):
                numbers |= {f"{name}.{each}": path for each in _names(node)}
    return numbers


def _files() -> dict[str, Path]:
    return {
        name: path
        for module, path in list_modules().items()
        if path.stem in FILES and (name := module.removeprefix(f"{PACKAGE}.")) not in OTHERWISE_NAMED
    }


def _patterns() -> Iterator[str]:
    for patterns in MEANINGS.values():
        yield from patterns


def test_numbers_that_tune_stand_in_their_packages_file() -> None:
    elsewhere = [name for name in _numbers() if not any(fnmatch(name, pattern) for pattern in _patterns())]
    assert elsewhere == [], (
        "move them to the package's tuning.py (or limits.py) with their unit and what they buy; "
        "if they mean something instead, add them to MEANINGS"
    )


def test_what_may_stand_elsewhere_is_there() -> None:
    assert [pattern for pattern in _patterns() if not any(fnmatch(name, pattern) for name in _numbers())] == []


@pytest.mark.parametrize("name", _files())
def test_every_number_says_what_it_is(name: str) -> None:
    """A comment above it, or above those that it directly follows."""
    lines = _files()[name].read_text().splitlines()
    first_words = [line.split(" ")[0].rstrip(",") for line in lines]
    bare = [
        line
        for above, line, word in zip(lines, lines[1:], first_words[1:], strict=False)
        if word.isupper() and word.isidentifier() and not above.startswith("#:") and not above.split(" ")[0].isupper()
    ]
    assert bare == []


def test_every_number_is_read() -> None:
    texts = [
        path.read_text() for name, path in list_modules().items() if name.removeprefix(f"{PACKAGE}.") not in _files()
    ]
    words = {
        word
        for text in texts
        if "tuning import" in text or "limits import" in text
        for word in re.findall(r"\w+", text)
    }
    unread = []
    for name, path in _files().items():
        text = path.read_text()
        for node in ast.parse(text).body:
            unread += [f"{name}.{each}" for each in _names(node) if each not in words and text.count(each) == 1]
    assert unread == []
