"""The seams together: plan → emit → compile → run on eight devices gives single-device JAX's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from shardwright import xla
from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.plans.plan import Plan
from tests.planner.microbatch.microbatch_programs import EXACT, small_gpt2
from tests.planner.programs import PROGRAMS, Program, lower, mlp

STEPS = 3
FORCES = (None, "data", "tensor", "mixed", "fsdp", "replicated")


def run_planned(program: Program, planned: Plan) -> list[list[np.ndarray]]:
    """Flat outputs of `STEPS` steps under a plan; state is fed back."""
    _, arguments, donated = program
    text = xla.emit_stablehlo(planned.require_hlo(), planned)
    loaded = xla.load_program(
        text.encode(),
        is_serialized=False,
        mesh=planned.mesh,
        arguments=[xla.BoundaryArray.of(variable) for variable in planned.parameters],
        outputs=[xla.BoundaryArray.of(variable) for variable in planned.outputs],
        donated=[variable.number for variable in planned.parameters if variable.alias is not None],
    )
    flat = jax.tree.leaves(arguments)
    state_size = len(jax.tree.leaves(arguments[: len(donated)]))
    batch = flat[state_size:]
    state = [_put(value, i, planned, loaded) for i, value in enumerate(flat[:state_size])]
    history = []
    for _ in range(STEPS):
        fed = [_put(value, state_size + i, planned, loaded) for i, value in enumerate(batch)]
        outputs = loaded.run([*state, *fed])
        history.append([_logical(value, i, planned) for i, value in enumerate(outputs)])
        state = outputs[:state_size]
    return history


def _put(value: Any, number: int, planned: Plan, loaded: Any) -> jax.Array:
    variable = planned.parameters[number]
    array = np.asarray(value).reshape(variable.shape)
    padding = [(0, stored - size) for stored, size in zip(variable.stored_shape, variable.shape, strict=True)]
    return jax.device_put(np.pad(array, padding) if padding else array, loaded.argument_shardings[number])


def _logical(value: Any, number: int, planned: Plan) -> np.ndarray:
    variable = planned.outputs[number]
    return np.asarray(value)[tuple(slice(size) for size in variable.shape)].reshape(variable.user_shape)


def run_single(program: Program) -> list[list[np.ndarray]]:
    step, arguments, donated = program
    state, batch = arguments[: len(donated)], arguments[len(donated) :]
    history = []
    jitted = jax.jit(step)
    for _ in range(STEPS):
        outputs = jitted(*state, *batch)
        history.append([np.asarray(leaf) for leaf in jax.tree.leaves(outputs)])
        state = outputs[: len(donated)]
    return history


def assert_same(planned: list[list[np.ndarray]], single: list[list[np.ndarray]]) -> None:
    for ours, theirs in zip(planned, single, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape
            distance = np.linalg.norm(a.astype(np.float64) - b.astype(np.float64))
            assert distance <= 1e-5 * max(np.linalg.norm(b.astype(np.float64)), 1e-2)


MODELS: dict[str, Callable[[], Program]] = {
    **PROGRAMS,
    "small gpt2": small_gpt2,
    **{name: EXACT[name] for name in ("masked", "time major", "rematerialised")},
}


@cache
def program_of(name: str) -> tuple[Program, str, list[list[np.ndarray]]]:
    """A program, its text, and its numbers on one device."""
    program = MODELS[name]()
    return program, lower(program), run_single(program)


DATA_MODEL = {"data": 2, "model": 4}
THREE_AXES = {"data": 2, "model": 2, "sequence": 2}


def label(value: str | dict[str, Any]) -> str:
    if isinstance(value, str):
        return value
    return " ".join(
        "x".join(map(str, each.values())) if isinstance(each, dict) else str(each) for each in value.values()
    )


@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"force": force}) for force in FORCES for name in PROGRAMS),
        *((name, {"force": "mixed", "mesh": THREE_AXES}) for name in ("mlp", "scan")),
        # in micro-batches, forced and searched
        ("small gpt2", {"force": "data", "micro_batches": 2}),
        ("small gpt2", {"force": "mixed", "mesh": DATA_MODEL, "micro_batches": 4}),
        ("small gpt2", {"force": "fsdp", "micro_batches": 2}),
        *((name, {"mesh": DATA_MODEL, "micro_batches": 2}) for name in ("masked", "time major", "rematerialised")),
    ],
    ids=label,
)
def test_planned_steps_give_single_device_numbers(name: str, options: dict[str, Any]) -> None:
    program, text, single = program_of(name)
    planned = plan(text, Cluster.local(8), PlanOptions(**options))
    if options.get("mesh") == THREE_AXES:
        assert {axis for collective in planned.collectives for axis in collective.axes} == THREE_AXES.keys()
    assert_same(run_planned(program, planned), single)


def test_padded_variables_give_single_device_numbers() -> None:
    """60 hidden units over 8 devices: weights are stored as 64, the program sees 60."""
    program = mlp(hidden=60)
    pins = {"params['w1']": {1: "model"}, "params['b1']": {0: "model"}, "params['w2']": {0: "model"}}
    planned = plan(lower(program), Cluster.local(8), PlanOptions(mesh={"model": 8}, force=pins))
    padded = {variable.name for variable in planned.parameters if variable.is_padded}
    assert padded >= pins.keys()  # and their momentum, where that is as cheap
    assert_same(run_planned(program, planned), run_single(program))


@pytest.mark.dear
def test_predicted_collectives_are_those_that_xla_inserts() -> None:
    planned = plan(lower(PROGRAMS["gpt2"]()), Cluster.local(8), PlanOptions(force="fsdp"))
    with xla.CompileService(8) as service:
        compiled = service.compile(planned.require_hlo(), planned)
    predicted: Counter[str] = Counter()
    observed: Counter[str] = Counter()
    for planned_one in planned.collectives:
        predicted[planned_one.kind] += planned_one.wire_bytes * planned_one.count
    for item in compiled.collectives:
        observed[item.kind] += item.wire_bytes * item.count
    assert sum(observed.values()) == pytest.approx(sum(predicted.values()), rel=0.02)
