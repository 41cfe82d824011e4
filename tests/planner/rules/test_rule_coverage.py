"""Every opcode that this jaxlib knows has a rule, or a stated reason why there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jaxlib import _hlo

from shardwright.errors import InternalError
from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.rules import coverage, rule_of, strategy_rule
from shardwright.planner.rules.table import opcode_table

#: Where HLO text spells an opcode in another way than its enumerator.
_SPELLED = {
    "kExp": "exponential", "kExpm1": "exponential-minus-one", "kLog1p": "log-plus-one", "kCos": "cosine",
    "kSin": "sine", "kClz": "count-leading-zeros", "kPopulationCount": "popcnt", "kTopK": "topk",
    "kOptimizationBarrier": "opt-barrier",
}  # fmt: skip
OPCODES = {
    name: _SPELLED.get(name, re.sub(r"(?<!^)([A-Z])", r"-\1", name[1:]).lower())
    for name in dir(_hlo.HloOpcode)
    if name.startswith("k")
}


@pytest.mark.parametrize("opcode", OPCODES.values())
def test_has_a_rule_or_a_reason(opcode: str) -> None:
    assert coverage().get(opcode), f"no rule and no reason for {opcode}"


def test_names_no_opcode_that_jaxlib_lacks() -> None:
    newer = {"atanh", "collective-reduce", "exp2", "log2", "shuffle"}
    assert set(coverage()) - set(OPCODES.values()) <= newer


# XLA's parser creates asynchronous instructions before it reads on, and aborts on their shapes.
@pytest.mark.parametrize("opcode", [text for name, text in OPCODES.items() if not re.search("Start|Done|Async", name)])
def test_spelling_is_what_xla_parses(opcode: str) -> None:
    shape = "()" if opcode == "tuple" else "f32[]"
    text = f"HloModule m\nENTRY e {{\n ROOT x = {shape} {opcode}"
    with pytest.raises(Exception, match=r"expects '\('"):
        _hlo.hlo_module_from_text(text)


def test_document_has_the_table() -> None:
    """`python -m oracles.rules --table` prints what belongs there."""
    document = Path(__file__).parents[3] / "docs" / "rules.md"
    assert opcode_table() in document.read_text()


def test_most_opcodes_that_compute_have_a_rule() -> None:
    """Whole are those that communicate, talk to the host or come after sharding, and the few that XLA gathers."""
    whole = {opcode for opcode, reason in coverage().items() if reason != "rule"}
    assert len(whole & set(OPCODES.values()) - {"collective-reduce", "shuffle"}) <= 41  # jaxlib 0.12 knows these, too


def test_unknown_opcode_is_replicated_with_a_reason() -> None:
    rule = rule_of(Instruction("x", "frobnicate", ArrayShape("f32", (4,))))
    assert rule.factors == ()
    assert rule.reason == "no strategy rule for opcode frobnicate"


def test_second_rule_for_an_opcode_is_refused() -> None:
    with pytest.raises(InternalError, match="two strategy rules"):
        strategy_rule("dot")(rule_of)
