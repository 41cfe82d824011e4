"""What arguments and outputs are called in messages and reports."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import OptionError
from shardwright.planner.graph.dataflow import Dataflow


def argument_names(flow: Dataflow, given: Sequence[str]) -> tuple[str, ...]:
    """Names per flat argument: those given, else JAX's `op_name` (`params['w']`), else the parameter's own."""
    if given:
        return _checked(given, len(flow.parameters), "argument_names", "arguments")
    found = []
    for index in flow.parameters:
        node = flow.nodes[index]
        name = node.instruction.op_name or node.instruction.name
        found.append(name if len(node.instruction.shape.leaves) == 1 else f"{name}[{node.leaf}]")
    return tuple(found)


def output_names(flow: Dataflow, given: Sequence[str]) -> tuple[str, ...]:
    """Names per flat output: those given, else `out[i]`."""
    if given:
        return _checked(given, len(flow.outputs), "output_names", "outputs")
    return tuple(f"out[{i}]" for i in range(len(flow.outputs)))


def _checked(given: Sequence[str], count: int, option: str, what: str) -> tuple[str, ...]:
    if len(given) != count:
        raise OptionError(f"{option} has {len(given)} names, the program {count} {what}")
    return tuple(given)
