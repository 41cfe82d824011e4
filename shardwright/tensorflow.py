"""Training steps of TensorFlow on the servers.

step = shardwright.tensorflow.parallelize(session, train_step)      # a function or tf.function of the batch
for x, y in dataset:
    loss = step(x, y)

model = shardwright.tensorflow.distribute(model, session)           # Keras on TensorFlow's backend
model.fit(dataset)

Importing this raises PlatformError without TensorFlow.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.builders.choices import read_options
from shardwright.errors import PlatformError
from shardwright.options.user_options import UserOptions, show_options

if importlib.util.find_spec("tensorflow") is None:
    raise PlatformError(
        "TensorFlow is not installed",
        where="tensorflow",
        remedy="pip install 'tensorflow>=2.21,<2.22' 'keras>=3.15.1,<3.16'",
    )

from shardwright.client.frontends.tensorflow import RemoteTensor, TensorFlowStep
from shardwright.client.frontends.tensorflow import keras_models as _models
from shardwright.client.frontends.tensorflow import parallelize as _parallelize

if TYPE_CHECKING:
    from shardwright.client.session import Session
    from shardwright.progress import PlanProgress

__all__ = ["RemoteTensor", "TensorFlowStep", "distribute", "gather", "parallelize", "step"]


@show_options
def parallelize(
    session: Session,
    function: Callable[..., Any],
    *,
    progress: Callable[[PlanProgress], None] | None = None,
    **options: Unpack[UserOptions],
) -> TensorFlowStep:
    """A step of TensorFlow that runs on the servers: all that `function` computes is one program.

    The variables that it uses become state of the servers, shared by all steps of the session; those here take the
    servers' values with `step.sync()`.

    Args:
      function: a Python function or a `tf.function` of a batch, with `tf.GradientTape`, optimizers and metrics inside;
        also `lambda x, y: model.train_step((x, y))` of a compiled Keras model.
      progress: called in this thread with a `PlanProgress` during planning.

    Raises OptionError on a wrong function or option. A call raises UnsupportedProgramError where XLA cannot compile
    what the function does, with the line.
    """
    builder, checked = read_options(options)
    return _parallelize(session, function, options=checked, builder=builder, progress=progress)


@show_options
def distribute(
    model: Any,
    session: Session,
    *,
    progress: Callable[[PlanProgress], None] | None = None,
    **options: Unpack[UserOptions],
) -> Any:
    """`model` itself, a Keras model on TensorFlow's backend: from now on its steps run in `session`.

    `fit`, `evaluate`, `predict` and callbacks are as ever. A variable is fetched when it is read (`get_weights`,
    `save`), and sent with the next step when it is assigned. The options are the training step's; steps that evaluate
    are planned around its state.

    Raises OptionError: no model, a wrong option, or another backend than TensorFlow.
    """
    builder, checked = read_options(options)
    return _models.attach(model, session, options=checked, builder=builder, progress=progress)


def gather(model: Any) -> Any:
    """`model` itself, with all variables on this machine: plain Keras again, without a session.

    Raises OptionError: it is not distributed.
    """
    return _models.gather(model)


def step(model: Any, kind: str = "train") -> TensorFlowStep:
    """The step behind `fit` ("train"), `evaluate` ("test") or `predict` ("predict"), for its `plan` and `report`.

    Raises PlanError before its first call. OptionError: the model is not distributed.
    """
    return _models.step_of(model, kind)
