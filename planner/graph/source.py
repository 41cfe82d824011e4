"""The input program, text and module: parsed once, shared by all planning steps."""

from __future__ import annotations

from shardwright.hlo import Module, parse


class Source:
    """HLO text, and its module."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._module: Module | None = None

    @property
    def module(self) -> Module:
        """The parsed module. Raises HloSyntaxError."""
        if self._module is None:
            self._module = parse(self.text)
        return self._module
