"""HLO text as a function of its parameters: called by position or by name, state by its aliases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from shardwright.client.array_specs import ArraySpec, ArrayType, array_spec
from shardwright.client.frontends.program import Program
from shardwright.client.frontends.values import check_type, is_type, to_argument
from shardwright.client.refusals import refusal
from shardwright.dtypes import to_dtype
from shardwright.errors import ArgumentError, OptionError, UnsupportedProgramError
from shardwright.hlo import ArrayShape, Attribute, Module, Shape, TupleShape, parse, require_values
from shardwright.hlo.attributes import parse_value
from shardwright.hlo.donation import pair_donors
from shardwright.hlo.entry import (
    Names,
    argument_number,
    argument_paths,
    flat_aliases,
    format_aliases,
    leaf_paths,
    name_parameters,
)
from shardwright.spelling import did_you_mean

_ALIASES, _DONORS = "input_output_alias", "buffer_donor"

#: Arguments that an error lists, at most.
_MAX_LISTED = 5


class HloFunction:
    """A program that exists already; see `Session.program`.

    Raises HloSyntaxError: the text is no HLO. UnsupportedProgramError: it leaves out constants, or takes or returns
    other things than arrays of fixed sizes. OptionError: wrong names, donated arguments or results.
    """

    def __init__(
        self,
        hlo_text: str,
        *,
        names: Names | None = None,
        donated: Iterable[int | str] | int | str | None = None,
        results: Any = None,
        name: str | None = None,
    ) -> None:
        module = parse(hlo_text)
        require_values(hlo_text)
        argument_leaves = [
            leaf for parameter in module.entry.parameters for leaf in _arrays(parameter.shape, parameter.name)
        ]
        output_leaves = _arrays(module.entry.root.shape, "the result")
        argument_names = name_parameters(module, names)
        arguments = tuple(
            _array_type(leaf, called) for leaf, called in zip(argument_leaves, argument_names, strict=True)
        )
        self.name = name or module.name
        self._numbers = {called: number for number, called in enumerate(argument_names)}
        self._types = arguments
        self._specs = tuple(_spec(leaf) for leaf in argument_leaves)
        outputs = [_spec(leaf) for leaf in output_leaves]
        result_tree, result_numbers, output_names = _result_structure(module.entry.root.shape, results)
        state = _State(module, arguments, output_leaves)
        aliases, consumed = state.choose(donated, argument_names)
        self._program = Program(
            name=self.name,
            hlo_text=state.write(hlo_text, aliases),
            arguments=arguments,
            outputs=tuple(_array_type(leaf, called) for leaf, called in zip(output_leaves, output_names, strict=True)),
            aliases=aliases,
            donated=consumed,
            specs=self._specs,
            results=tuple(outputs),
            result_tree=result_tree,
            result_numbers=result_numbers,
        )

    def describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_types: bool = False
    ) -> tuple[tuple[()], list[Any], None]:
        """See `FrontEnd.describe`: one signature, since the types are the program's. No argument at all stands for its
        types.

        Raises ArgumentError: arguments missing, unknown, given twice, or of other types.
        """
        if takes_types and not args and not kwargs:
            return (), list(self._specs), None
        leaves = []
        for leaf, kind, spec in zip(self._bind(args, kwargs), self._types, self._specs, strict=True):
            if is_type(leaf):
                if not takes_types:
                    raise refusal(leaf)
                check_type(leaf, kind)
                leaves.append(leaf)
            else:
                leaves.append(to_argument(leaf, kind, spec))
        return (), leaves, None

    def lower(self, signature: Any, *, platform: str) -> Program:
        """The program, on any platform."""
        del signature, platform
        return self._program

    def check_arguments(self, arguments: Any) -> None:
        """Nothing is changed in place."""

    def write_back(self, arguments: Any, program: Program, results: Sequence[Any]) -> None:
        """Nothing is changed in place."""

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The arguments in order."""
        count = len(self._types)
        if len(args) > count:
            raise ArgumentError(f"{len(args)} arguments were passed; there are {count}", where=self.name)
        if not kwargs and len(args) == count:
            return list(args)
        values = dict(enumerate(args))
        for name, value in kwargs.items():
            number = self._numbers.get(name)
            if number is None:
                raise ArgumentError(
                    f"there is no argument {name!r}", where=self.name, remedy=did_you_mean(name, self._numbers)
                )
            if number in values:
                raise ArgumentError(f"{name} was passed twice, by position {number} and by name", where=self.name)
            values[number] = value
        missing = [kind.name for number, kind in enumerate(self._types) if number not in values]
        if missing:
            more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
            raise ArgumentError(f"{', '.join(missing[:_MAX_LISTED])}{more} were not passed", where=self.name)
        return [values[number] for number in range(count)]


class _State:
    """Arguments that a program updates in place, by the text or by the user."""

    def __init__(self, module: Module, arguments: Sequence[ArrayType], outputs: Sequence[ArrayShape]) -> None:
        self._module = module
        self._argument_types = [(kind.element_type, kind.shape) for kind in arguments]
        self._output_types = [(leaf.element_type, leaf.dimensions) for leaf in outputs]
        self._aliases = flat_aliases(module)
        paths = argument_paths(module)
        donors = {(donor.parameter_number, donor.parameter_index) for donor in module.donors}
        self._donors = {number for number, path in enumerate(paths) if path in donors}

    def choose(
        self, donated: Iterable[int | str] | int | str | None, names: Sequence[str]
    ) -> tuple[dict[int, int], frozenset[int]]:
        """(output → argument updated in place, arguments that a call consumes)."""
        if donated is None:
            consumed = self._donors | set(self._aliases.values())
        else:
            if not isinstance(donated, int | str | Iterable):
                raise OptionError(
                    f"{donated!r} names no arguments", where="donated", remedy="give numbers or names of arguments"
                )
            keys = [donated] if isinstance(donated, int | str) else list(donated)
            consumed = {argument_number(key, names, where="donated") for key in keys}
        aliases = {output: argument for output, argument in self._aliases.items() if argument in consumed}
        paired = pair_donors(consumed, self._argument_types, self._output_types, aliases)
        return aliases | paired, frozenset(consumed)

    def write(self, text: str, aliases: Mapping[int, int]) -> str:
        """The text with exactly these aliases in its header."""
        if aliases == self._aliases and not self._donors:
            return text
        module = self._module
        header = {name: value for name, value in module.header.items() if name not in (_ALIASES, _DONORS)}
        if aliases:
            value = format_aliases(module, aliases)
            header[_ALIASES] = Attribute(_ALIASES, value, parse_value(_ALIASES, value))
        return Module(module.name, header, module.computations, module.entry, module.tables).to_text()


def _arrays(shape: Shape, name: str) -> list[ArrayShape]:
    """The arrays of a parameter or of the result. Raises UnsupportedProgramError on anything else."""
    if isinstance(shape, TupleShape):
        return [leaf for element in shape.elements for leaf in _arrays(element, name)]
    if not isinstance(shape, ArrayShape):
        raise UnsupportedProgramError(
            "a token or a buffer comes in or goes out, and no array",
            where=name,
            remedy="export the program without side effects (callbacks, infeed) at its boundary",
        )
    if any(shape.dynamic):
        raise UnsupportedProgramError(
            f"a dimension of {list(shape.dimensions)} has no fixed size",
            where=name,
            remedy="export it for fixed shapes",
        )
    return [shape]


def _array_type(leaf: ArrayShape, name: str) -> ArrayType:
    return ArrayType(name=name, element_type=leaf.element_type, shape=leaf.dimensions)


def _spec(leaf: ArrayShape) -> ArraySpec:
    return array_spec(leaf.dimensions, to_dtype(leaf.element_type))


def _result_structure(root: Shape, results: Any) -> tuple[Any, tuple[int, ...], list[str]]:
    """(structure of the result, output number of each leaf of it, name of each output).

    results: a pytree of output numbers; None has the root's tuples.
    """
    count = len(root.leaves)
    if results is None:
        numbers = iter(range(count))
        results = _nest(root, numbers)
        names = ["result" + "".join(f"[{step}]" for step in path) for path in leaf_paths(root)]
        return jax.tree.structure(results), tuple(range(count)), names
    leaves, tree = jax.tree.flatten_with_path(results)
    names = [f"out[{number}]" for number in range(count)]
    for path, number in leaves:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise OptionError(
                f"{number!r} is no output of the program",
                where="results" + jax.tree_util.keystr(path),
                remedy=f"give a pytree of output numbers, 0 to {count - 1}",
            )
        names[number] = "result" + jax.tree_util.keystr(path)
    numbers_of_leaves = tuple(number for _, number in leaves)
    if len(set(numbers_of_leaves)) != len(numbers_of_leaves):
        raise OptionError("an output stands twice in it", where="results", remedy="name each output once")
    return tree, numbers_of_leaves, names


def _nest(shape: Shape, numbers: Any) -> Any:
    if isinstance(shape, TupleShape):
        return tuple(_nest(element, numbers) for element in shape.elements)
    return next(numbers)
