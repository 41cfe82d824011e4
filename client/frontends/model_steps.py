"""What the front ends of Keras share, whatever its backend: a model's train, test and predict steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from shardwright.errors import OptionError, PlanError
from shardwright.options.plan_options import PlanOptions

#: Kind of a step → the calls that run it.
KINDS: Mapping[str, str] = {"train": "fit or train_on_batch", "test": "evaluate", "predict": "predict"}

_Step = TypeVar("_Step")


def require_compiled_run(model: Any) -> None:
    """Raises OptionError on a model that was compiled to run op by op."""
    if model.run_eagerly:
        raise OptionError(
            "run_eagerly=True runs a model op by op, here",
            where="compile",
            remedy="leave it out, or look for the fault in the model before it is distributed",
        )


def require_kind(kind: str) -> None:
    """Raises OptionError on what is no kind of step."""
    if kind not in KINDS:
        raise OptionError(f"kind is {kind!r}", where="kind", remedy=f"one of {', '.join(KINDS)}")


def require_step(steps: Mapping[str, _Step], kind: str) -> _Step:
    """The step of a kind. Raises PlanError before its first call, OptionError on an unknown kind."""
    require_kind(kind)
    if kind not in steps:
        raise PlanError(f"the model has no {kind} step yet", remedy=f"call {KINDS[kind]} first")
    return steps[kind]


def evaluation_options(options: PlanOptions, *, is_trained: bool) -> PlanOptions:
    """The user's options for a step that evaluates: without what concerns training.

    It is planned around the state of a trained model; before training, as `force` and `rest` say.
    """
    options = options.without_trials()
    around_state = replace(options, force=None, rest="search") if is_trained else options
    return replace(
        around_state,
        plan_json="",
        micro_batches=None,
        micro_batch_inexact=False,
        stages=None,
        schedule=None,
        imbalance=None,
    )
