"""Names of arguments and outputs in messages and reports."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import OptionError
from shardwright.hlo.entry import parameter_names
from shardwright.planner.graph.dataflow import Dataflow


def argument_names(flow: Dataflow, names: Sequence[str]) -> tuple[str, ...]:
    """Names per flat argument: those given, else `parameter_names`."""
    if names:
        return _check_count(names, len(flow.parameters), "argument_names", "arguments")
    return parameter_names(flow.module)


def output_names(flow: Dataflow, names: Sequence[str]) -> tuple[str, ...]:
    """Names per flat output: those given, else `out[i]`."""
    if names:
        return _check_count(names, len(flow.outputs), "output_names", "outputs")
    return tuple(f"out[{i}]" for i in range(len(flow.outputs)))


def _check_count(names: Sequence[str], count: int, option: str, what: str) -> tuple[str, ...]:
    if len(names) != count:
        raise OptionError(f"{option} has {len(names)} names, the program {count} {what}")
    return tuple(names)
