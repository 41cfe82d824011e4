"""The boundary of a module: arguments and outputs, counted flat over all arrays, their names and aliases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from shardwright.errors import OptionError
from shardwright.hlo.ir import Instruction, Module
from shardwright.hlo.shapes import Shape, TupleShape
from shardwright.spelling import did_you_mean

#: What names arguments: one name each, in order, or some of them, by number or by the text's own name.
Names = Sequence[str] | Mapping[int, str] | Mapping[str, str]

#: Name that TensorFlow's compiler gives to every parameter.
_NO_NAME = "XLA_Args"


# ---- names ---------------------------------------------------------------------------


def parameter_names(module: Module) -> tuple[str, ...]:
    """Unique names per flat argument: JAX's `op_name` (`params['w']`), else the parameter's own.

    An `op_name` shared by several parameters (`XLA_Args`), or one repeating the operation's kind (`xla__device_data`),
    is ignored.
    """
    parameters = module.entry.parameters
    named = Counter(parameter.op_name for parameter in parameters if _is_named(parameter))
    unique_names = {name for name, count in named.items() if count == 1}
    leaf_names: list[str] = []
    for parameter in parameters:
        name = parameter.op_name
        if not _is_named(parameter) or named[name] > 1:
            name = parameter.name if parameter.name not in unique_names else f"{parameter.name}#{parameter.index}"
        leaves = len(parameter.shape.leaves)
        leaf_names += [name] if leaves == 1 else [f"{name}[{leaf}]" for leaf in range(leaves)]
    return tuple(leaf_names)


def _is_named(parameter: Instruction) -> bool:
    metadata = parameter.get("metadata") or {}
    return parameter.op_name not in ("", _NO_NAME, metadata.get("op_type"))


def name_parameters(module: Module, names: Names | None) -> tuple[str, ...]:
    """Names per flat argument: those given, else the text's own (`parameter_names`).

    Raises OptionError: names of another number, of unknown arguments, or of two arguments.
    """
    own = parameter_names(module)
    if names is None:
        return own
    if isinstance(names, str) or not isinstance(names, Sequence | Mapping):
        raise OptionError(
            f"{type(names).__name__} is no list of names",
            where="names",
            remedy="give a list, or a mapping from numbers",
        )
    chosen = list(own)
    if isinstance(names, Mapping):
        for key, name in names.items():
            chosen[argument_number(key, own, where="names")] = name
    elif len(names) != len(own):
        raise OptionError(
            f"{len(names)} names, but the program has {len(own)} arguments",
            where="names",
            remedy=f"name all of them, or some by a mapping; they are {', '.join(own[:8])}{', …' if own[8:] else ''}",
        )
    else:
        chosen = list(names)
    for number, name in enumerate(chosen):
        if not isinstance(name, str) or not name:
            raise OptionError(f"{name!r} is no name of argument {number}", where="names", remedy="give a text")
    twice = [name for name, count in Counter(chosen).items() if count > 1]
    if twice:
        raise OptionError(f"two arguments are called {twice[0]!r}", where="names", remedy="give each its own name")
    return tuple(chosen)


def argument_number(key: int | str, names: Sequence[str], *, where: str) -> int:
    """Number of the argument that a number or a name says. Raises OptionError at `where` on an unknown one."""
    if isinstance(key, str) and key in names:
        return names.index(key)
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(names):
        return key
    some = did_you_mean(key, names) if isinstance(key, str) else f"they are 0 to {len(names) - 1}"
    raise OptionError(
        f"the program has no argument {key!r}", where=where, remedy=some or f"it has {', '.join(names[:8])}"
    )


# ---- paths and aliases ---------------------------------------------------------------


def leaf_paths(shape: Shape) -> Iterator[tuple[int, ...]]:
    """Paths of the array leaves, in order."""
    if isinstance(shape, TupleShape):
        for number, element in enumerate(shape.elements):
            yield from ((number, *path) for path in leaf_paths(element))
    elif shape.leaves:
        yield ()


def flat_aliases(module: Module) -> dict[int, int]:
    """Output leaf → parameter leaf with the reusable buffer, both counted flat over all arrays."""
    first = [0]
    for parameter in module.entry.parameters:
        first.append(first[-1] + len(parameter.shape.leaves))
    starts: dict[int, list[int]] = {}
    aliases = {}
    for alias in module.aliases:
        output = _flat_index(module.entry.root.shape, alias.output_index, starts)
        parameter = module.entry.parameters[alias.parameter_number]
        aliases[output] = first[alias.parameter_number] + _flat_index(parameter.shape, alias.parameter_index, starts)
    return aliases


def _flat_index(shape: Shape, path: tuple[int, ...], starts: dict[int, list[int]]) -> int:
    """Number of the first array leaf behind an index. starts: of each tuple's elements, by its id; filled here."""
    flat = 0
    for step in path:
        assert isinstance(shape, TupleShape)
        if id(shape) not in starts:
            starts[id(shape)] = [0, *accumulate(len(element.leaves) for element in shape.elements)]
        flat += starts[id(shape)][step]
        shape = shape.elements[step]
    return flat


def argument_paths(module: Module) -> list[tuple[int, tuple[int, ...]]]:
    """(parameter, path in it) of each flat argument."""
    return [
        (number, path)
        for number, parameter in enumerate(module.entry.parameters)
        for path in leaf_paths(parameter.shape)
    ]


def format_aliases(module: Module, aliases: Mapping[int, int]) -> str:
    """The value of `input_output_alias` for flat output → flat argument."""
    outputs, arguments = list(leaf_paths(module.entry.root.shape)), argument_paths(module)
    lines = []
    for output, argument in sorted(aliases.items()):
        parameter, path = arguments[argument]
        lines.append(f"{_format_index(outputs[output])}: ({parameter}, {_format_index(path)}, may-alias)")
    return f"{{ {', '.join(lines)} }}"


def _format_index(path: tuple[int, ...]) -> str:
    return f"{{{', '.join(map(str, path))}}}"
