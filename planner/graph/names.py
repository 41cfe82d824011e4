"""Names of arguments and outputs in messages and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwright.errors import OptionError
from shardwright.hlo import Instruction, Module
from shardwright.planner.graph.dataflow import Dataflow


def argument_names(flow: Dataflow, given: Sequence[str]) -> tuple[str, ...]:
    """Names per flat argument: those given, else `parameter_names`."""
    if given:
        return _check_count(given, len(flow.parameters), "argument_names", "arguments")
    return parameter_names(flow.module)


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
    return parameter.op_name not in ("", metadata.get("op_type"))


def output_names(flow: Dataflow, given: Sequence[str]) -> tuple[str, ...]:
    """Names per flat output: those given, else `out[i]`."""
    if given:
        return _check_count(given, len(flow.outputs), "output_names", "outputs")
    return tuple(f"out[{i}]" for i in range(len(flow.outputs)))


def _check_count(given: Sequence[str], count: int, option: str, what: str) -> tuple[str, ...]:
    if len(given) != count:
        raise OptionError(f"{option} has {len(given)} names, the program {count} {what}")
    return tuple(given)
