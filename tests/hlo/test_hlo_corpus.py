"""Every opcode, attribute and printing style: what we print is what XLA reads as the same module."""

from __future__ import annotations

from pathlib import Path

import pytest
from generate_corpus import texts
from referee import CORPUS_FILES, STYLES, all_opcodes, opcodes_in, print_by_xla

from shardwright.errors import HloSyntaxError
from shardwright.hlo import Module, parse

#: Enumerators of later jaxlibs: no text that holds them can be read by the first one supported.
NEWER_OPCODES = {"kCollectiveReduce", "kExp2", "kLog2", "kShuffle"}


def by_name(path: Path) -> str:
    return path.stem


def show(module: Module) -> list[object]:
    """Everything the IR holds, as comparable values."""
    header = {name: attribute.value for name, attribute in module.header.items()}
    facts: list[object] = [module.name, header, dict(module.tables), module.entry.name]
    for computation in module.computations:
        parameters = [parameter.name for parameter in computation.parameters]
        facts.append((computation.name, computation.is_entry, computation.root.name, parameters))
        facts.append({name: attribute.value for name, attribute in computation.attributes.items()})
        for i in computation:
            operands = [operand.name for operand in i.operands]
            attributes = {name: attribute.value for name, attribute in i.attributes.items()}
            called = {name: [callee.name for callee in callees] for name, callees in i.called.items()}
            facts.append(
                (i.name, i.opcode, i.shape, operands, i.payload.split(), i.index, i.is_root, attributes, called)
            )
    return facts


@pytest.mark.parametrize("path", CORPUS_FILES, ids=by_name)
def test_printed_text_is_an_equal_module_to_xla(path: Path) -> None:
    text = path.read_text()
    assert print_by_xla(parse(text).to_text()) == print_by_xla(text)


@pytest.mark.parametrize("path", CORPUS_FILES, ids=by_name)
def test_printed_text_is_the_same_module_to_us(path: Path) -> None:
    module = parse(path.read_text())
    again = parse(module.to_text())
    assert show(again) == show(module)
    assert again.to_text() == module.to_text()


@pytest.mark.parametrize("style", STYLES)
def test_every_style_that_xla_reads_back(style: str) -> None:
    read = 0
    for path in CORPUS_FILES:
        text = print_by_xla(path.read_text(), style)
        try:
            expected = print_by_xla(text)
        except HloSyntaxError:
            continue  # a style that loses what XLA itself needs: a name that is a keyword, a renamed predecessor
        assert print_by_xla(parse(text).to_text()) == expected, f"{path.name} printed as {style}"
        read += 1
    assert read > 0.9 * len(CORPUS_FILES)


def test_corpus_has_every_opcode_that_jaxlib_knows() -> None:
    seen: set[str] = set()
    for path in CORPUS_FILES:
        seen |= opcodes_in(path.read_text())
    assert all_opcodes() - seen - NEWER_OPCODES == set()


@pytest.mark.dear
def test_what_the_installed_jax_prints_today() -> None:
    for name, text in texts().items():
        assert print_by_xla(parse(text).to_text()) == print_by_xla(text), name


@pytest.mark.parametrize(
    "constant",
    [
        "f32[2,2]{1,0} constant({...})",
        "pred[12]{0} constant({ ... })",
        "c64[12]{0} constant({...})",
        "bf16[2,2]{1,0} constant({ {...}, {...} })",
        "s32[2,2]{1,0} constant({ {1,2}, {...} })",
        "c64[2,2]{1,0} constant({ {(1,2),(3,4)}, {...} })",
        "(f32[12]{0}, s32[]) constant(({...}, 1))",
        "(f32[12]{0}, s32[]) constant({...})",
    ],
)
def test_elided_constants_come_back_as_they_are(constant: str) -> None:
    module = parse(f"HloModule m\nENTRY e {{\n  ROOT c = {constant}\n}}\n")
    assert module.entry.root.is_elided
    assert constant in module.to_text()
    assert not parse("HloModule m\nENTRY e {\n  ROOT c = f32[2] constant({1, 2})\n}\n").entry.root.is_elided


@pytest.mark.parametrize("literal", ["f32[] constant({...})", "f32[2] constant(...)", "f32[2] constant({1, ...})"])
def test_nothing_but_an_array_is_elided(literal: str) -> None:
    with pytest.raises(HloSyntaxError, match="where the values of an array were left out"):
        parse(f"HloModule m\nENTRY e {{\n  ROOT c = {literal}\n}}\n")
