"""A program that returns its arguments: what moves arrays from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from shardwright.client.array_specs import ArraySpec, array_type
from shardwright.client.frontends.program import Program


def identity_program(specs: Sequence[ArraySpec]) -> Program:
    """The program of `lambda *arrays: arrays` for arrays of these types."""
    types = tuple(array_type(f"arrays[{n}]", spec) for n, spec in enumerate(specs))
    shapes = [kind.type_text for kind in types]
    lines = [f"  p.{n} = {shape} parameter({n})" for n, shape in enumerate(shapes)]
    operands = ", ".join(f"p.{n}" for n in range(len(types)))
    root = f"  ROOT result = ({', '.join(shapes)}) tuple({operands})"
    text = "\n".join(["HloModule move", "", "ENTRY main {", *lines, root, "}", ""])
    numbers = tuple(range(len(types)))
    return Program(
        name="move",
        hlo_text=text,
        arguments=types,
        outputs=types,
        aliases={},
        donated=frozenset(),
        specs=tuple(specs),
        results=tuple(specs),
        result_tree=jax.tree.structure(numbers),
        result_numbers=numbers,
    )
