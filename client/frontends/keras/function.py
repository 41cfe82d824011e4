"""A step of Keras over (state, data) as a program: arguments are named by the paths of variables.

Keras' own steps take all state and return all of it. The program takes the variables that the step changes, in place,
then those that it only reads, then the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import keras
from jax.extend.source_info_util import register_exclusion

from shardwright.client.array_operators import keep_handles
from shardwright.client.array_specs import type_of
from shardwright.client.frontends.jax import JaxFunction
from shardwright.client.frontends.program import Program

register_exclusion(__file__)  # source lines in programs are the user's, …
register_exclusion(str(Path(keras.__file__).parent))  # … of their layers and steps, not Keras' own

#: (new values of all variables, what the step returns besides) of values of all variables and a batch.
StatelessStep = Callable[[Sequence[Any], Any], tuple[Sequence[Any], Any]]

_BATCH = ("x", "y", "sample_weight")


class KerasFunction:
    """One of Keras' steps, ready to be lowered; a `FrontEnd`.

    It is called with (values of all variables, batch); the result is (number of a variable → its new value, what the
    step returns besides).

    names: of the variables, unique. result_name: what reports call the rest of the result. updates_all: every variable
    is updated in place. Otherwise those that the step does not change are read only: a step that evaluates has no say
    in how they lie.
    """

    def __init__(
        self, name: str, step: StatelessStep, names: Sequence[str], *, result_name: str, updates_all: bool
    ) -> None:
        self.name = name
        self._step = step
        self._names = tuple(names)
        self._result_name = result_name
        self._changed: dict[Hashable, frozenset[int]] = {}
        self._all = frozenset(range(len(self._names))) if updates_all else None

        def run(changed: dict[int, Any], read: dict[int, Any], data: Any) -> tuple[dict[int, Any], Any]:
            old = [changed[n] if n in changed else read[n] for n in range(len(changed) + len(read))]
            new, rest = step(old, data)
            return {n: _with_type_of(old[n], new[n]) for n in changed}, rest

        run.__name__ = name
        self._function = JaxFunction(run, donate_argnums=0)

    def describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_types: bool = False
    ) -> tuple[Hashable, list[Any], Any]:
        """See `FrontEnd.describe`."""
        values, data = args
        changed = self._all if self._all is not None else self._find_changed(values, data)
        parts: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        for number, value in enumerate(values):
            parts[number not in changed][number] = value
        return self._function.describe((*parts, data), kwargs, takes_types=takes_types)

    def lower(self, signature: Any, *, platform: str) -> Program:
        """See `FrontEnd.lower`."""
        program = self._function.lower(signature, platform=platform)
        (changed, unchanged, *_), _ = jax.tree.unflatten(signature.tree, range(signature.tree.num_leaves))
        state = [self._names[number] for number in (*changed, *unchanged)]
        arguments = [replace(kind, name=name) for kind, name in zip(program.arguments, state, strict=False)]
        arguments += [replace(kind, name=batch_name(kind.name)) for kind in program.arguments[len(state) :]]
        outputs = [replace(kind, name=name) for kind, name in zip(program.outputs, state[: len(changed)], strict=False)]
        outputs += [
            replace(kind, name=kind.name.replace("result[1]", self._result_name, 1))
            for kind in program.outputs[len(changed) :]
        ]
        return replace(program, arguments=tuple(arguments), outputs=tuple(outputs))

    def check_arguments(self, arguments: Any) -> None:
        """Nothing is changed in place."""

    def write_back(self, arguments: Any, program: Program, results: Sequence[Any]) -> None:
        """Nothing is changed in place."""

    def _find_changed(self, values: Sequence[Any], data: Any) -> frozenset[int]:
        """Numbers of the variables whose value the step replaces."""
        leaves, tree = jax.tree.flatten(data)
        key = (tree, tuple((getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves))
        if key not in self._changed:
            numbers: list[int] = []

            def run(old: list[Any], data: Any) -> Any:
                new, rest = self._step(old, data)
                numbers.extend(number for number, value in enumerate(old) if new[number] is not value)
                return rest

            with keep_handles(), jax.disable_jit(False):
                jax.eval_shape(run, [type_of(value).aval for value in values], data)
            self._changed[key] = frozenset(numbers)
        return self._changed[key]


def _with_type_of(old: Any, new: Any) -> Any:
    """A new value in its variable's type, never a weak one: the next call is to be one of the same types."""
    return jax.lax.convert_element_type(new, old.dtype)


def batch_name(name: str) -> str:
    """`data[0]['image']` → `x['image']`."""
    for number, part in enumerate(_BATCH):
        prefix = f"data[{number}]"
        if name.startswith(prefix):
            return part + name[len(prefix) :]
    return name
