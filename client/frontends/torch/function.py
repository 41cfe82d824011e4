"""Calls of a torch step as a front end: a traced graph becomes a program of the session."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.client.array_specs import ArraySpec, array_spec, array_type
from shardwright.client.frontends.jax.donations import aliases_of
from shardwright.client.frontends.jax.function import trace_settings
from shardwright.client.frontends.program import Program
from shardwright.client.frontends.torch.dtypes import numpy_type, to_numpy
from shardwright.client.frontends.torch.evaluation import Evaluation
from shardwright.client.frontends.torch.tracing import Graph, TensorType
from shardwright.client.limits import MIN_ARGUMENT_ELEMENTS

#: How JAX calls the arguments of `lower_graph`'s function.
_PARAMETER = re.compile(r'op_name="leaves\[(\d+)\]"')

KEY_SPEC = array_spec((2,), np.dtype("uint32"))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a step.

    key: equal for calls that run the same program. leaves: state, random key, numbers, batch.
    """

    key: Hashable
    leaves: list[Any]
    names: tuple[str, ...]
    types: tuple[TensorType | None, ...]
    state_count: int
    numbers: tuple[float, ...]
    graph: Graph

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """Types of the leaves."""
        return tuple(KEY_SPEC if kind is None else _spec(kind) for kind in self.types)

    @property
    def signature(self) -> Hashable:
        """What tells programs apart: the key, and JAX's settings."""
        return self.key, trace_settings()


@dataclass(slots=True)
class Traced:
    """What a program's results mean. changed: state numbers, the first results; then, if it draws, the random key; then
    the number of the first check that did not hold, where there are checks; then the tensors among the user's results.
    """

    changed: tuple[int, ...]
    draws: bool
    has_checks: bool

    @staticmethod
    def of(graph: Graph) -> Traced:
        return Traced(tuple(sorted(graph.changed)), graph.draws > 0, bool(graph.checks))


@dataclass(slots=True)
class TorchFunction:
    """The front end of one torch step; see `FrontEnd`. traced: by key."""

    name: str
    traced: dict[Hashable, Traced] = field(default_factory=dict)
    _calls: dict[Hashable, Call] = field(default_factory=dict)

    def describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_types: bool = False
    ) -> tuple[Hashable, list[Any], Any]:
        del kwargs, takes_types
        (call,) = args
        key = call.signature
        if key not in self.traced:
            self._calls[key] = call
        return key, call.leaves, call

    def check_arguments(self, arguments: Any) -> None:
        """Nothing is changed in place."""

    def write_back(self, arguments: Any, program: Program, results: Sequence[Any]) -> None:
        """The step takes its state back by itself."""

    def lower(self, signature: Any, *, platform: str) -> Program:
        call = self._calls.pop(signature)
        graph = call.graph
        traced = Traced.of(graph)
        program = lower_graph(graph, call, traced, name=self.name, platform=platform)
        self.traced[signature] = traced
        return program


def function_of(
    graph: Graph, call: Call, traced: Traced
) -> tuple[Callable[..., tuple[Any, ...]], dict[str, np.ndarray]]:
    """A traced step as a function of arrays, and the constants that it takes behind the call's leaves, by name."""
    hoisted = {key: to_numpy(v) for key, v in graph.constants.items() if v.numel() >= MIN_ARGUMENT_ELEMENTS}
    inline = {key: to_numpy(value) for key, value in graph.constants.items() if key not in hoisted}
    count, random_at = len(call.types), call.state_count

    def run(*leaves: Any) -> tuple[Any, ...]:
        leaves, constants = leaves[:count], leaves[count:]
        key = jax.random.wrap_key_data(leaves[random_at], impl="threefry2x32")
        next_key, step_key = jax.random.split(key) if traced.draws else (None, None)
        inputs = [leaf for number, leaf in enumerate(leaves) if number != random_at]
        evaluation = Evaluation(graph.nodes, inline | dict(zip(hoisted, constants, strict=True)), step_key)
        outputs = evaluation.run(inputs)
        results = [outputs[number] for number in traced.changed]
        if next_key is not None:
            results.append(jax.random.key_data(next_key))
        if evaluation.checks:
            failed = ~jnp.stack(evaluation.checks)
            befores = [leaves[number] for number in traced.changed]
            held = [jnp.where(failed.any(), old, new) for old, new in zip(befores, results, strict=False)]
            results = [*held, *results[len(held) :], jnp.where(failed.any(), failed.argmax(), -1)]
        results += outputs[call.state_count :]
        return tuple(results)

    return run, hoisted


def lower_graph(graph: Graph, call: Call, traced: Traced, *, name: str, platform: str) -> Program:
    """HLO of a traced step, with its arguments and results by name."""
    run, constants = function_of(graph, call, traced)
    hoisted, values = list(constants), list(constants.values())
    specs = call.specs
    random_at = call.state_count
    run.__name__ = name if name.isidentifier() else "step"
    donated = (*traced.changed, *([random_at] if traced.draws else []))
    arguments = [array_type(entry_name, spec) for entry_name, spec in zip(call.names, specs, strict=True)]
    arguments += [
        array_type(f"constants.{key}", array_spec(value.shape, value.dtype))
        for key, value in zip(hoisted, values, strict=True)
    ]
    with jax.enable_x64(True):
        avals = [spec.aval for spec in specs] + [array_spec(v.shape, v.dtype).aval for v in values]
        jitted = jax.jit(run, donate_argnums=donated, keep_unused=True).trace(*avals)
        text = jitted.lower(lowering_platforms=(platform,)).as_text("hlo", debug_info=True)
        text = _PARAMETER.sub(lambda match: f'op_name="{arguments[int(match[1])].name}"', text)
        results = tuple(array_spec(tuple(o.shape), np.dtype(o.dtype)) for o in jitted.out_info)
    output_names = [call.names[number] for number in donated] + ["checks"] * traced.has_checks + [*graph.new_state]
    count = len(results) - len(output_names)
    output_names += ["result"] if count == 1 else [f"result[{n}]" for n in range(count)]
    outputs = [array_type(entry_name, spec) for entry_name, spec in zip(output_names, results, strict=True)]
    return Program(
        name=name,
        hlo_text=text,
        arguments=tuple(arguments),
        outputs=tuple(outputs),
        aliases=aliases_of(text, arguments, outputs),
        donated=frozenset(donated),
        specs=specs,
        results=results,
        result_tree=jax.tree.structure(list(results)),
        result_numbers=tuple(range(len(results))),
        constants=dict(enumerate(values, len(specs))),
    )


def _spec(kind: TensorType) -> ArraySpec:
    return array_spec(kind.shape, numpy_type(kind.dtype))
