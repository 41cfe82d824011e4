"""Names of arguments and outputs in messages and reports."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import OptionError
from shardwright.hlo.entry import parameter_names
from shardwright.planner.graph.dataflow import Dataflow


def argument_names(flow: Dataflow, given: Sequence[str]) -> tuple[str, ...]:
    """Names per flat argument: those given, else `parameter_names`."""
    if given:
        return _check_count(given, len(flow.parameters), "argument_names", "arguments")
    return parameter_names(flow.module)


def output_names(flow: Dataflow, given: Sequence[str]) -> tuple[str, ...]:
    """Names per flat output: those given, else `out[i]`."""
    if given:
        return _check_count(given, len(flow.outputs), "output_names", "outputs")
    return tuple(f"out[{i}]" for i in range(len(flow.outputs)))


def _check_count(given: Sequence[str], count: int, option: str, what: str) -> tuple[str, ...]:
    if len(given) != count:
        raise OptionError(f"{option} has {len(given)} names, the program {count} {what}")
    return tuple(given)
