"""Unique names in a module, numbered like XLA's."""

from __future__ import annotations

_MAX_SUFFIX_DIGITS = 18


class _Numbers:
    """Numbers in use behind one name, and the first that may be free."""

    __slots__ = ("next_free", "used")

    def __init__(self, number: int) -> None:
        self.used = {number}
        self.next_free = 0


class NameUniquer:
    """Renames what was named already: `x` becomes `x.1`, a second `constant.46` the first free `constant.N`.

    Computations may use each other's instruction names. XLA numbers the later ones when it reads a
    text, in text order; an instruction must be called the same here and there.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, _Numbers] = {}

    def register(self, name: str) -> str:
        """`name`, or the name that it gets because another one has it."""
        root, _, suffix = name.rpartition(".")
        if root and suffix.removeprefix("-").isdigit() and len(suffix) <= _MAX_SUFFIX_DIGITS:
            number = int(suffix)
        else:
            root, suffix, number = name, "", 0
        numbers = self._numbers.get(root)
        if numbers is None:
            self._numbers[root] = _Numbers(number)
        elif number not in numbers.used:
            numbers.used.add(number)
        else:
            while numbers.next_free in numbers.used:
                numbers.next_free += 1
            number = numbers.next_free
            numbers.used.add(number)
            return f"{root}.{number}" if number or suffix else root
        return f"{root}.{number}" if suffix[:1] in ("0", "-") else name
