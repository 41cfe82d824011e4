"""A TensorFlow function traced for some types: a program of its tensors and variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf

from shardwright.client.frontends.hlo import HloFunction
from shardwright.client.frontends.names import unique_names
from shardwright.client.frontends.program import Program
from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import parse
from shardwright.xla.formats import read_program

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')
_SOURCE = re.compile(r'op_name="((?:[^"\\]|\\.)*)" source_file="(?:[^"\\]|\\.)*" source_line=\d+')
_MAX_MESSAGE = 600
#: Source lines in these folders are the frameworks' own.
_FRAMEWORKS = tuple(str(Path(path).parent) for path in (tf.__file__, keras.__file__, __file__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A traced function.

    program: of the tensors, then the variables; its result is (the function's, new values of `updated`).
    variables: in the program's order. names: theirs.
    structure: of the function's result, with a tensor for each output.
    """

    program: Program
    variables: tuple[Any, ...]
    names: tuple[str, ...]
    updated: tuple[Any, ...]
    structure: Any

    def unpack(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(values of the function's tensors, new values of `updated`) of the leaves of the program's result."""
        by_output = dict(zip(self.program.result_numbers, leaves, strict=True))
        values = [by_output[number] for number in range(len(by_output))]
        count = len(values) - len(self.updated)
        return values[:count], values[count:]

    def pack(self, values: Sequence[Any]) -> Any:
        """The function's result, of the values of its tensors."""
        rest = iter(values)
        leaves = [None if leaf is None else next(rest) for leaf in tf.nest.flatten(self.structure)]
        return tf.nest.pack_sequence_as(self.structure, leaves)


def trace(
    function: Callable[..., Any],
    paths: Callable[[], Mapping[int, str]],
    specs: Sequence[Any],
    names: Sequence[str],
    title: str,
) -> Trace:
    """Traces `function(*tensors)`.

    paths: `id()` of a variable → its path. specs: types of the tensors. names: theirs, in reports. title: the
    program's name.

    Raises UnsupportedProgramError: TensorFlow cannot compile it for XLA, it uses other resources than variables, or
    returns other things than tensors.
    """
    compiled = tf.function(function, jit_compile=True)
    concrete = compiled.get_concrete_function(*specs)
    captures = _Captures(concrete.graph, paths(), title)
    _require_tensors(concrete.structured_outputs, title)
    text = _with_source_lines(_lower(compiled, specs, title), concrete.graph)
    first, count = len(specs), len(concrete.outputs)
    outputs = len(parse(text).entry.root.shape.leaves)
    results = (_number_leaves(concrete.structured_outputs, count), list(range(count, outputs)))
    argument_names = (*names, *captures.names)
    program = HloFunction(text, names=argument_names, results=results, name=title).lower((), platform="cpu")
    numbers = [program.aliases[output] for output in range(count, outputs)]
    return Trace(
        program=_with_constants(
            replace(program, outputs=_name_outputs(program, count)),
            {first + number: value for number, value in captures.constants.items()},
        ),
        variables=tuple(captures.variables.values()),
        names=tuple(argument_names[first + number] for number in captures.variables),
        updated=tuple(captures.variables[number - first] for number in numbers),
        structure=concrete.structured_outputs,
    )


class _Captures:
    """What a traced function takes besides its arguments.

    variables, constants: number of the capture → variable, or value of a tensor. names: of all captures.
    """

    def __init__(self, graph: Any, paths: Mapping[int, str], title: str) -> None:
        by_handle = {id(variable.handle): variable for variable in graph.variables}
        self.variables: dict[int, Any] = {}
        self.constants: dict[int, np.ndarray] = {}
        names = []
        for number, (tensor, _) in enumerate(graph.captures):
            variable = by_handle.get(id(tensor))
            if variable is not None:
                self.variables[number] = variable
                names.append(paths.get(id(variable)) or variable.name.partition(":")[0])
            elif tensor.dtype in (tf.resource, tf.variant, tf.string):
                raise UnsupportedProgramError(
                    f"it uses a {tensor.dtype.name} that is no variable: a table, an iterator, or text",
                    where=title,
                    remedy="read and look up outside the step, and pass the tensors",
                )
            else:
                self.constants[number] = np.asarray(tensor)
                names.append(f"constant[{len(self.constants) - 1}]")
        for variable in self.variables.values():
            if variable.dtype == tf.string or not variable.shape.is_fully_defined():
                raise UnsupportedProgramError(
                    f"variable {variable.name} is of type {variable.dtype.name}{variable.shape}",
                    where=title,
                    remedy="use variables of numbers, of fixed shapes",
                )
        self.names = unique_names(names)


def _lower(compiled: Any, specs: Sequence[Any], title: str) -> str:
    try:
        return read_program(compiled.experimental_get_compiler_ir(*specs)(stage="hlo_serialized"))
    except (ValueError, tf.errors.OpError) as error:
        raise _explain_refusal(str(error), title) from None


def _explain_refusal(message: str, title: str) -> UnsupportedProgramError:
    frames = [(path, line) for path, line in _FRAME.findall(message) if not path.startswith(_FRAMEWORKS)]
    text = message.removeprefix("Failed getting HLO text: ").strip("'").partition("Stack trace for op")[0]
    summary = " ".join(text.split())[:_MAX_MESSAGE]
    remedy = (
        "give sizes as Python numbers or numpy arrays, not as tensors made outside the step"
        if "compile-time constant" in message
        else "keep what XLA cannot compile (text, files, printing, shapes that depend on values) outside the step"
    )
    return UnsupportedProgramError(
        summary, where=f"{frames[-1][0]}:{frames[-1][1]}" if frames else title, remedy=remedy
    )


def _with_source_lines(text: str, graph: Any) -> str:
    """The program with the user's source lines: TensorFlow gives its own."""
    lines: dict[str, str] = {}

    def label(match: re.Match[str]) -> str:
        name = match[1]
        if name not in lines:
            lines[name] = _source_of(graph, name)
        return f'op_name="{name}"{lines[name]}'

    return _SOURCE.sub(label, text)


def _source_of(graph: Any, name: str) -> str:
    try:
        frames = graph.get_operation_by_name(name).traceback
    except (KeyError, ValueError):  # of an inner function
        return ""
    for frame in reversed(list(frames)):
        if not frame.filename.startswith(_FRAMEWORKS) and "autograph_generated_file" not in frame.filename:
            path = frame.filename.replace("\\", "\\\\").replace('"', '\\"')
            return f' source_file="{path}" source_line={frame.lineno}'
    return ""


def _require_tensors(structure: Any, title: str) -> None:
    for leaf in tf.nest.flatten(structure):
        if leaf is not None and not isinstance(leaf, tf.Tensor):
            raise UnsupportedProgramError(
                f"it returns a {type(leaf).__name__}",
                where=title,
                remedy="return dense tensors: tf.convert_to_tensor(x), tf.sparse.to_dense(x), x.to_tensor()",
            )


def _number_leaves(structure: Any, count: int) -> Any:
    """The structure with the number of its output in place of each tensor; a list where it is none of JAX's."""
    numbers = iter(range(count))
    numbered = tf.nest.map_structure(lambda leaf: None if leaf is None else next(numbers), structure)
    leaves = jax.tree.leaves(numbered)
    return numbered if sorted(leaves, key=str) == sorted(range(count), key=str) else list(range(count))


def _name_outputs(program: Program, count: int) -> tuple[Any, ...]:
    results = [replace(kind, name=kind.name.replace("result[0]", "result", 1)) for kind in program.outputs[:count]]
    updates = [
        replace(kind, name=program.arguments[program.aliases[count + number]].name)
        for number, kind in enumerate(program.outputs[count:])
    ]
    return (*results, *updates)


def _with_constants(program: Program, constants: Mapping[int, np.ndarray]) -> Program:
    specs = tuple(spec for number, spec in enumerate(program.specs) if number not in constants)
    return replace(program, constants=constants, specs=specs)
