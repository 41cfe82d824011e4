"""What is planned, as text and as what it says: read once, however many steps of planning look at it."""

from __future__ import annotations

from shardwright.hlo import Module, parse


class Source:
    """HLO text, and the module that it describes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._module: Module | None = None

    @property
    def module(self) -> Module:
        """Raises HloSyntaxError."""
        if self._module is None:
            self._module = parse(self.text)
        return self._module
