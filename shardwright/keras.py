"""Keras models on the servers: `fit`, `evaluate` and `predict` as ever, on Keras' JAX backend.

    model = shardwright.keras.distribute(model, session)
    model.compile(...)
    model.fit(...)

The weights, the optimizer's state, metrics and random seeds live on the servers. A variable is fetched when it is read
(`get_weights`, `save`, a callback), and sent with the next step when it is assigned.

Importing this raises PlatformError without Keras, and OptionError under another backend than JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.builders.choices import read_options
from shardwright.client.frontends.keras.backend import require_jax_backend
from shardwright.client.frontends.sessions import require_session
from shardwright.options.user_options import UserOptions, show_options

require_jax_backend()

from shardwright.client.frontends.keras import births, checkpoints, lowering, training  # noqa: E402
from shardwright.client.frontends.keras.checkpoints import BackupAndRestore, ModelCheckpoint  # noqa: E402

if TYPE_CHECKING:
    import os

    from shardwright.client.checkpoints import Save
    from shardwright.client.frontends.program import Program
    from shardwright.client.session import Session
    from shardwright.client.step import Step
    from shardwright.progress import PlanProgress

__all__ = [
    "BackupAndRestore",
    "ModelCheckpoint",
    "distribute",
    "gather",
    "lower",
    "restore",
    "save",
    "scope",
    "step",
]


@show_options
def distribute(
    model: Any,
    session: Session,
    *,
    layouts: Any = None,
    progress: Callable[[PlanProgress], None] | None = None,
    **options: Unpack[UserOptions],
) -> Any:
    """`model` itself: from now on its steps run in `session`.

    It may be compiled before or afterwards. A second call changes the options or the session.

    Args:
      model: a keras.Model of any kind.
      layouts: a `keras.distribution.LayoutMap`, `ModelParallel` or `DataParallel`: its layouts are pins, its mesh is
        the plan's. `force=` takes pins by path as well, {"decoder/*/kernel": {1: "model"}}; the batch is `x`, `y` and
        `sample_weight`.
      progress: called in this thread with a `PlanProgress` during planning.

    The options are the training step's; steps that evaluate are planned around its state.

    Raises OptionError: no model, a wrong option or layout, `keras.distribution.set_distribution` in force. `fit` raises
    OptionError for a model compiled with `run_eagerly=True`.
    """
    builder, checked = read_options(options)
    training.attach(model, session, checked, builder, layouts=layouts, progress=progress)
    return model


@contextmanager
@show_options
def scope(
    session: Session | None = None,
    *,
    layouts: Any = None,
    progress: Callable[[PlanProgress], None] | None = None,
    **options: Unpack[UserOptions],
) -> Iterator[None]:
    """A `with` block in which models are built without memory, and distributed at its end.

    Variables are types only. Their initializers run on the servers, in the layouts of the first step; under the same
    seeds the values are those of plain Keras, but for rounding.

    Args:
      session: None: the models stay types, for `lower`.
      layouts, progress, options: see `distribute`.
    """
    builder, checked = read_options(options)
    if session is not None:
        require_session(session)
    with births.collect_births() as born:
        yield
    if session is None:
        return
    births.settle(session._state.steps, born.variables)
    for model in born.models:
        training.attach(model, session, checked, builder, layouts=layouts, progress=progress)


def gather(model: Any) -> Any:
    """`model` itself, with all variables on this machine: plain Keras again, without a session.

    Raises OptionError: it is not distributed.
    """
    of_model = training.distribution_of(model)
    of_model.fetch_all()
    of_model.detach()
    return model


def step(model: Any, kind: str = "train") -> Step:
    """The step behind `fit` ("train"), `evaluate` ("test") or `predict` ("predict"), for its `plan` and `report`.

    Raises PlanError before its first call. OptionError: the model is not distributed.
    """
    return training.distribution_of(model).step(kind)


def lower(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None, *, kind: str = "train", platform: str = "cpu"
) -> Program:
    """The program of a step of `model`, compiled, as for `shardwright.plan`; no server is asked.

    Args:
      x, y, sample_weight: a batch, of arrays or of types (`jax.ShapeDtypeStruct`), nested as the model takes them.
      kind: "train", "test" or "predict".
      platform: the cluster's platform ("cpu", "cuda" or "tpu"); this machine's may differ.

    Variables may be types, of a model built under `scope()`. Raises OptionError: an unknown kind, or a model that is
    not compiled.
    """
    return lowering.lower_step(model, (x, y, sample_weight), kind=kind, platform=platform)


def save(
    model: Any, directory: str | os.PathLike[str], *, step: int | None = None, max_to_keep: int | None = None
) -> Save:
    """Writes the variables of a model and of its optimizer to a distributed checkpoint; see `Session.save`.

    The variables are named by their paths. Raises OptionError: the model is not distributed.
    """
    return checkpoints.save(model, directory, step=step, max_to_keep=max_to_keep)


def restore(model: Any, directory: str | os.PathLike[str], *, step: int | None = None) -> None:
    """Puts a checkpoint of `save` into a model's variables; the next step reads them, in its layouts.

    step: number of the checkpoint; default: the latest. Raises CheckpointError: there is none, or it lacks a variable.
    OptionError: the model is not distributed.
    """
    checkpoints.restore(model, directory, step=step)
