"""Names of Python modules that an operator allows: `my_data,other.pkg`."""

from __future__ import annotations

from collections.abc import Iterable


def read_module_names(text: str) -> tuple[str, ...]:
    """The names of a list with commas between them. Raises ValueError, with the name, on one that is none."""
    return check_module_names(name.strip() for name in text.split(",") if name.strip())


def check_module_names(names: Iterable[str]) -> tuple[str, ...]:
    """The same names, each once. Raises ValueError, with the name, on one that no module has."""
    unique = tuple(dict.fromkeys(names))
    for name in unique:
        if not is_module_name(name):
            raise ValueError(f"{name!r} is no name of a module")
    return unique


def is_module_name(name: object) -> bool:
    """Whether it is identifiers with dots between them."""
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def is_allowed(module: str, allowed: Iterable[str]) -> bool:
    """Whether a module is one of `allowed`, or lies in a package that is."""
    return any(module == name or module.startswith(f"{name}.") for name in allowed)
