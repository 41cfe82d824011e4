"""Predicted collectives of a plan beside XLA's in the partitioned program, in text and data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.plans.plan import Plan
from shardwright.report.groups import join_names
from shardwright.report.memory import memory_table
from shardwright.report.proof import Observed, Proof, ProofLine, prove
from shardwright.report.tables import plain_grid, plain_table, plain_text
from shardwright.units import format_bytes

#: Rows of a table before the rest is summed up in one.
_SHOWN = 16

_NUMBER = re.compile(r"\d+")
_SUFFIX = re.compile(r"(?<=[A-Za-z_\-])(\.\d+)+\b")


def explain_collectives(plan: Plan, observed: Iterable[Observed], *, width: int = 110) -> str:
    """The proof of a plan by its program's collectives, in plain text."""
    return explain_proof(prove(plan, observed), width=width)


# ---- proofs ----------------------------------------------------------------------
def explain_proof(proof: Proof, *, everything: bool = False, width: int = 110) -> str:
    """Verdict, totals by kind, axes and cause, and the differences, in plain text; every line with `everything`."""
    return plain_text(render_proof(proof, everything=everything), width)


def render_proof(proof: Proof, *, everything: bool = False) -> Group:
    """The same in a form printed by rich."""
    return Group(
        *_verdict(proof),
        *_totals(proof),
        *_differences(proof),
        *(_every_line(proof) if everything else ()),
        *_memory(proof),
    )


def proof_as_dict(proof: Proof) -> dict[str, Any]:
    """A proof in plain data, for `--json`; bytes of one device a step."""
    return {
        "module": proof.module_name,
        "on": proof.on,
        "mesh": proof.mesh.sizes,
        "holds": proof.holds,
        "tolerance": proof.tolerance,
        "predicted_wire_bytes": proof.predicted_wire_bytes,
        "observed_wire_bytes": proof.observed_wire_bytes,
        "lines": [{**dataclasses.asdict(line), "axes": list(line.axes)} for line in proof.lines],
        "memory": dataclasses.asdict(proof.memory) if proof.memory else None,
    }


def _verdict(proof: Proof) -> list[RenderableType]:
    said = "has the predicted collectives" if proof.holds else "does not have the predicted collectives"
    table = plain_grid("left", "left")
    for label, value in (
        ("mesh", str(proof.mesh)),
        ("predicted", f"{format_bytes(proof.predicted_wire_bytes)} a device sends a step"),
        ("in the program", f"{format_bytes(proof.observed_wire_bytes)}{_percent(proof)}"),
        ("lines that differ", f"{len(proof.differences)} of {len(proof.lines)}"),
        ("bytes that differ", f"{proof.difference:.2%}, tolerance {proof.tolerance:.1%}"),
    ):
        table.add_row(Text(label), Text(value))
    on = f" on {proof.on}" if proof.on else ""
    title = Text(f"XLA's program of {proof.module_name}{on} {said}", style="bold" if proof.holds else "bold red")
    return [title, Padding(table, (0, 0, 1, 2))]


def _percent(proof: Proof) -> str:
    if not proof.predicted_wire_bytes:
        return ""
    return f" ({proof.observed_wire_bytes / proof.predicted_wire_bytes - 1:+.2%})"


def _totals(proof: Proof) -> list[RenderableType]:
    if not proof.lines:
        return [Text("No collectives on either side."), Text("")]
    table = plain_table(
        [("collective", "left"), ("over", "left"), ("why", "left"), ("plan", "right"), ("program", "right")],
        fold=("why",),
    )
    groups = _group_lines(proof.lines)
    for lines in groups[:_SHOWN]:
        _add(table, [lines[0].kind, _over(lines[0]), _why(lines)], lines)
    if len(groups) > _SHOWN:
        rest = [line for lines in groups[_SHOWN:] for line in lines]
        _add(table, ["", "", f"{len(groups) - _SHOWN} more groups"], rest)
    table.add_section()
    _add(table, ["all", "", ""], proof.lines)
    title = Text("Bytes that one device sends a step, and executions, by kind, axes and cause", style="bold")
    return [title, Padding(table, (0, 0, 1, 2))]


def _differences(proof: Proof) -> list[RenderableType]:
    groups = _group_lines(proof.differences)
    if not groups:
        return []
    table = plain_table(
        [
            ("", "left"),
            ("collective", "left"),
            ("over", "left"),
            ("source", "left"),
            ("why", "left"),
            ("plan", "right"),
            ("program", "right"),
        ],
        fold=("why",),
    )
    for lines in groups[:_SHOWN]:
        _add(table, [lines[0].status, lines[0].kind, _over(lines[0]), _sources(lines), _why(lines)], lines)
    if len(groups) > _SHOWN:
        rest = [line for lines in groups[_SHOWN:] for line in lines]
        _add(table, ["", "", "", "", f"{len(groups) - _SHOWN} more groups"], rest)
    return [Text("Differences", style="bold"), Padding(table, (0, 0, 1, 2))]


def _every_line(proof: Proof) -> list[RenderableType]:
    if not proof.lines:
        return []
    table = plain_table(
        [("instruction", "left"), ("source", "left"), ("collective", "left"), ("over", "left"), ("plan", "right"),
         ("program", "right"), ("", "left")],
        fold=("instruction", "source"),
    )  # fmt: skip
    for line in proof.lines:
        status = "" if line.status == "agrees" else line.status
        _add(table, [line.instruction, line.where, line.kind, _over(line)], [line], status)
    return [Text("Every line", style="bold"), Padding(table, (0, 0, 1, 2))]


def _memory(proof: Proof) -> list[RenderableType]:
    if proof.memory is None:
        return []
    return [Text("Memory", style="bold"), Padding(memory_table(proof.memory), (0, 0, 1, 2))]


def _group_lines(lines: Iterable[ProofLine]) -> list[list[ProofLine]]:
    """Lines grouped when they differ only in numbers of their cause; the most bytes first."""
    groups: dict[tuple[object, ...], list[ProofLine]] = {}
    for line in lines:
        groups.setdefault((line.status, line.kind, line.over, _NUMBER.sub("#", _cause(line))), []).append(line)
    return sorted(groups.values(), key=lambda group: -max(_wire(group)))


def _add(table: Table, cells: Sequence[str], lines: Sequence[ProofLine], *more: str) -> None:
    predicted, observed = _wire(lines)
    plan = f"{format_bytes(predicted)} in {sum(line.predicted_count for line in lines)}"
    program = f"{format_bytes(observed)} in {sum(line.observed_count for line in lines)}"
    table.add_row(*(Text(cell) for cell in (*cells, plan, program, *more)))


def _wire(lines: Sequence[ProofLine]) -> tuple[int, int]:
    return sum(line.predicted_wire_bytes for line in lines), sum(line.observed_wire_bytes for line in lines)


def _over(line: ProofLine) -> str:
    return line.over or f"{line.group_size} devices"


def _why(lines: Sequence[ProofLine]) -> str:
    return join_names([_cause(line) for line in lines])


def _cause(line: ProofLine) -> str:
    return _SUFFIX.sub("", line.cause) or (f"nothing in the plan, at {line.where or line.instruction}")


def _sources(lines: Sequence[ProofLine]) -> str:
    """The first source line, and how many others there are."""
    places = list(dict.fromkeys(line.where for line in lines if line.where))
    return places[0] + (f" +{len(places) - 1}" if len(places) > 1 else "") if places else ""
