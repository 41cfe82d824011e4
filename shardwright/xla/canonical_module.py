"""Programs with no difference but instruction names: XLA compiles such twins once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from shardwright.xla.compiled import CompiledProgram

#: Where an operation comes from: `loc("dot.5")`.
_LOCATION = re.compile(r'(?<=loc\(")(?:[^"\\]|\\.)*(?=")')
#: What a module defines under a name of its own. Others, such as the targets of custom calls, have a meaning.
_DEFINITION = re.compile(r"(?:module|func\.func(?: private| public)?) @([\w.$-]+)")
_SYMBOL = re.compile(r"@([\w.$-]+)")


@dataclass(frozen=True, slots=True)
class CanonicalModule:
    """A StableHLO module, `original`, beside the same `text` with numbers for the names in it.

    locations: names of instructions, in the order of their numbers.
    """

    original: str
    text: str
    locations: tuple[str, ...]

    @classmethod
    def of(cls, stablehlo: str) -> Self:
        """The canonical form of a module with locations, written by `emit_stablehlo`."""
        locations: dict[str, int] = {}
        text = _LOCATION.sub(lambda match: str(locations.setdefault(match[0], len(locations))), stablehlo)
        symbols = {name: number for number, name in enumerate(dict.fromkeys(_DEFINITION.findall(text)))}
        text = _SYMBOL.sub(lambda match: f"@{symbols.get(match[1], match[1])}", text)
        return cls(stablehlo, text, tuple(locations))

    def rename_compiled(self, twin: CanonicalModule, compiled: CompiledProgram) -> CompiledProgram:
        """XLA's result for `twin`, renamed to this module's instructions. `text` must be the same."""
        names = dict(zip(twin.locations, self.locations, strict=True))
        return replace(
            compiled,
            stablehlo=self.original,
            collectives=tuple(
                replace(collective, op_name=names.get(collective.op_name, collective.op_name))
                for collective in compiled.collectives
            ),
            compile_s=0.0,
        )
