"""All opcodes with their rules, in a human-readable table."""

from __future__ import annotations

from itertools import groupby

from shardwright.planner.rules.base import RULES, coverage


def opcode_table() -> str:
    """A Markdown table of all opcodes: those with a rule by its summary, the others by their reason."""
    rows: list[tuple[str, str, str]] = []
    for opcode, reason in coverage().items():
        if opcode in RULES:
            rows.append(("rule", _summary(opcode), opcode))
        else:
            rows.append(("whole", reason, opcode))
    rows.sort()
    ruled = sum(kind == "rule" for kind, _, _ in rows)
    lines = [
        f"{len(rows)} opcodes: {ruled} with a rule, {len(rows) - ruled} whole on every device.",
        "",
        "| | opcodes | rule, or why whole |",
        "|---|---|---|",
    ]
    for (kind, text), group in groupby(rows, key=lambda row: row[:2]):
        lines.append(f"| {kind} | {', '.join(opcode for _, _, opcode in group)} | {text} |")
    return "\n".join(lines)


def _summary(opcode: str) -> str:
    """The first line of the rule's docstring."""
    return (RULES[opcode].__doc__ or "").strip().split("\n")[0]
