"""XLA's own parser and printers, as the referee of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlib import _hlo

from shardwright.xla.private import parse_hlo

CORPUS = Path(__file__).parent / "corpus"
CORPUS_FILES = sorted(CORPUS.glob("*.hlo"))

#: Options of XLA's printer beside its defaults, one set for each style that its own parser reads back.
STYLES: dict[str, dict[str, Any]] = {
    "full": {"print_large_constants": True},
    "operand_shapes": {"print_large_constants": True, "print_operand_shape": True},
    "no_sigils": {"print_large_constants": True, "print_percent": False},
    "no_program_shape": {"print_large_constants": True, "print_program_shape": False},
    "no_layouts": {"print_large_constants": True, "include_layout_in_shapes": False},
    "no_metadata": {"print_large_constants": True, "print_metadata": False},
    "no_extras": {"print_large_constants": True, "print_backend_config": False, "print_control_dependencies": False},
    "indented": {"print_large_constants": True, "indent_amount": 3},
    "renamed": {"print_large_constants": True, "canonicalize_instruction_names": True},
    "ordered": {"print_large_constants": True, "canonicalize_computations": True},
}


def print_options(style: str) -> Any:
    options = _hlo.HloPrintOptions()
    for name, value in STYLES[style].items():
        setattr(options, name, value)
    return options


def print_by_xla(text: str, style: str = "full") -> str:
    """What XLA prints of a text: equal for equal modules, every constant and attribute included."""
    return str(parse_hlo(text).to_string(print_options(style)))


def opcodes_in(text: str) -> set[str]:
    """XLA's enumerators (`kDot`) of the instructions of a text."""
    return {
        instruction.opcode.name
        for computation in parse_hlo(text).computations()
        for instruction in computation.instructions()
    }


def all_opcodes() -> set[str]:
    return {name for name in dir(_hlo.HloOpcode) if name.startswith("k")}
