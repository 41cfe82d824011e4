"""`shardwright tune`: runs a step on made-up arguments until its plan is settled by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.client.array_specs import ArraySpec, key_impl_name
from shardwright.client.frontends.jax import JaxFunction
from shardwright.client.limits import TELL_EVERY_S
from shardwright.errors import DeadlineError
from shardwright.options.plan_options import MEASURED

if TYPE_CHECKING:
    from shardwright.client.plan_changes import PlanChange
    from shardwright.client.session import Session

#: Changes that end the trials.
_ENDS = frozenset({"kept", "went back", "remembered", "search ended"})

#: The options of `Session.parallelize` that say what the arguments are.
_MARKS = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")


def tune(
    session: Session,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    limit_s: float,
    tell: Callable[[PlanChange], None],
    **options: Any,
) -> tuple[PlanChange, ...]:
    """Calls `function(*arguments)` as a step with `effort="measured"` until its fastest plan runs; returns the changes.

    arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s, and static arguments. Types become small random numbers,
    zeros if they are integers, keys. Arguments that a result updates are made on the servers and take the results.
    limit_s: seconds that it may take. tell: called with each change of the plan. options: of `Session.parallelize`.

    Raises DeadlineError once the time is over, and what the step raises.
    """
    end_s = time.monotonic() + limit_s
    marks = {name: options[name] for name in _MARKS if name in options}
    signature, values, _ = JaxFunction(function, **marks).describe(tuple(arguments), {}, takes_types=True)
    step = session.parallelize(function, effort=MEASURED, **options)
    lowered = step.lower(*arguments)
    leaves = [_value_of(value, spec) for value, spec in zip(values, lowered.specs, strict=True)]
    passed = [number for number in lowered.leaf_numbers if number not in lowered.captured]
    updated = set(lowered.aliases.values())
    state = {place: lowered.specs[place] for place, number in enumerate(passed) if number in updated}
    if state:
        handles = step.init(lambda: [_value_on_servers(*each) for each in state.items()])
        for place, handle in zip(state, handles, strict=True):
            leaves[place] = handle
    place_of = {number: place for place, number in enumerate(passed)}
    told_count = 0
    while True:
        args, kwargs = JaxFunction.join(signature, leaves)
        results = jax.tree.leaves(step(*args, **kwargs))
        output_of = dict(zip(lowered.result_numbers, results, strict=True))
        for output, argument in lowered.aliases.items():
            if argument in place_of and output in output_of:
                leaves[place_of[argument]] = output_of[output]
        if results:
            np.asarray(results[-1])
        is_ready = False
        while not is_ready:  # steps beside the searches would only slow them down
            is_ready = step.wait_for_plans(TELL_EVERY_S)
            changes = step.plan_changes
            for change in changes[told_count:]:
                tell(change)
            told_count = len(changes)
            if any(change.kind in _ENDS for change in changes) or step.is_settled:
                return changes
            if time.monotonic() > end_s:
                raise DeadlineError(
                    f"the plans were not measured within {limit_s:g} s: {changes[-1]}",
                    remedy="give a longer --limit, or a deadline= for each search",
                )


def _value_of(value: Any, spec: ArraySpec) -> Any:
    """An array of a type; other leaves are the user's."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return value
    if spec.is_key:
        return jax.random.split(jax.random.key(0, impl=key_impl_name(spec)), spec.shape)
    if jnp.issubdtype(spec.dtype, jnp.inexact):
        return np.random.default_rng(0).normal(0.0, 0.02, spec.shape).astype(spec.dtype)
    return np.zeros(spec.shape, spec.dtype)


def _value_on_servers(seed: int, spec: ArraySpec) -> jax.Array:
    if spec.is_key:
        return jax.random.split(jax.random.key(seed, impl=key_impl_name(spec)), spec.shape)
    if jnp.issubdtype(spec.dtype, jnp.inexact):
        return (0.02 * jax.random.normal(jax.random.key(seed), spec.shape)).astype(spec.dtype)
    return jnp.zeros(spec.shape, spec.dtype)
