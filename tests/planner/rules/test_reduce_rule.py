"""Which reduced dimensions may be split, and how their partial results are combined."""

from __future__ import annotations

import pytest

from shardwright.hlo import parse
from shardwright.planner.rules import rule_of


def combine_payloads(reductions: str, element_type: str, initial: str) -> set[str | None]:
    """What combines partial results of a reduce of as many arrays as there are words; nothing where it stays whole."""
    words, values = reductions.split(), initial.split()
    arrays = range(len(words))
    scalars = [f"{element_type}[]"] * len(words)

    def listed(prefix: str) -> str:
        return ", ".join(f"{prefix}{i}" for i in arrays)

    def shape(of: list[str]) -> str:
        return of[0] if len(of) == 1 else f"({', '.join(of)})"

    parameters = [f"  {side}{i} = {element_type}[] parameter({i + len(words) * number})"
                  for number, side in enumerate("ab") for i in arrays]  # fmt: skip
    region = [f"  {'ROOT ' * (len(words) == 1)}c{i} = {element_type}[] {words[i]}(a{i}, b{i})" for i in arrays]
    root = [f"  ROOT r = {shape(scalars)} tuple({listed('c')})"] if len(words) > 1 else []
    entry = [f"  x{i} = {element_type}[4,8] parameter({i})" for i in arrays]
    entry += [f"  v{i} = {element_type}[] constant({values[i]})" for i in arrays]
    made = f"  ROOT s = {shape([f'{element_type}[4]'] * len(words))} reduce({listed('x')}, {listed('v')})"
    entry.append(f"{made}, dimensions={{1}}, to_apply=region")
    text = "\n".join(["HloModule m", "region {", *parameters, *region, *root, "}", "ENTRY main {", *entry, "}"])
    rule = rule_of(parse(text).entry.root)
    assert [factor.results[0] for factor in rule.factors if not factor.contracted] == [0]
    return {factor.reduction for factor in (*rule.factors, *rule.exchange_factors) if factor.contracted}


@pytest.mark.parametrize(
    ("reduction", "element_type", "neutral", "other"),
    [
        ("add", "f32", "-0", "1"),
        ("add", "c64", "(0, 0)", "(0, 1)"),
        ("multiply", "s32", "1", "0"),
        ("maximum", "f32", "-inf", "0"),
        ("maximum", "s64", "-9223372036854775808", "-9223372036854775807"),
        ("maximum", "u8", "0", "1"),
        ("minimum", "bf16", "inf", "-inf"),
        ("minimum", "s8", "127", "-128"),
        ("minimum", "u16", "65535", "32767"),
        ("and", "pred", "true", "false"),
        ("or", "pred", "false", "true"),
        ("maximum", "pred", "false", "true"),
    ],
)
def test_a_reduction_starts_from_its_neutral_element(
    reduction: str, element_type: str, neutral: str, other: str
) -> None:
    neutral, other = neutral.replace(" ", ""), other.replace(" ", "")
    assert combine_payloads(reduction, element_type, neutral) == {reduction}
    assert combine_payloads(reduction, element_type, other) == set()


@pytest.mark.parametrize("reduction", ["and", "or"])
def test_bits_have_no_all_reduce(reduction: str) -> None:
    assert combine_payloads(reduction, "u32", {"and": "4294967295", "or": "0"}[reduction]) == set()


def test_several_arrays_are_gathered() -> None:
    assert combine_payloads("add add", "f32", "0 0") == {"gather"}
    assert combine_payloads("add maximum", "s32", "0 -2147483648") == {"gather"}
    assert combine_payloads("and add", "s32", "-1 0") == {"gather"}
    assert combine_payloads("add maximum", "s32", "0 0") == set()
