"""Keras models on TensorFlow's backend whose steps run on servers.

A variable of such a model is fetched when it is read, and marked when it is assigned: its class is a subclass that says
so to the session's `VariableStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from shardwright.builders.base import Builder
from shardwright.client.frontends.model_steps import KINDS, evaluation_options, require_compiled_run, require_step
from shardwright.client.frontends.sessions import require_session
from shardwright.client.frontends.tensorflow.function import TensorFlowFunction
from shardwright.client.frontends.tensorflow.owners import keras_variables
from shardwright.client.frontends.tensorflow.step import TensorFlowStep
from shardwright.client.frontends.tensorflow.variables import VariableStore, store_of
from shardwright.errors import OptionError
from shardwright.options.plan_options import PlanOptions

if TYPE_CHECKING:
    from shardwright.client.session import Session
    from shardwright.progress import PlanProgress

_ATTRIBUTE = "_shardwright"
_OVERRIDES = tuple(f"make_{kind}_function" for kind in KINDS)
_STORE = "_shardwright_store"

#: Stands for a part that a batch does not have.
_ABSENT = "absent"


class DistributedModel:
    """The hooks of one model in one session."""

    def __init__(
        self,
        model: Any,
        session: Session,
        options: PlanOptions,
        builder: Builder | None,
        progress: Callable[[PlanProgress], None] | None,
    ) -> None:
        self.model = model
        self.session = session._state
        self._options = options
        self._builder = builder
        self._progress = progress
        self._store = store_of(self.session.steps)
        self._steps: dict[str, TensorFlowStep] = {}
        self._traced: dict[str, int] = {}  # by kind: traces when variables were last watched
        self._is_trained = False

    def attach(self) -> None:
        """Takes the place of Keras' functions in this very model; its class stays as it is."""
        for name in _OVERRIDES:
            object.__setattr__(self.model, name, getattr(self, name))
        object.__setattr__(self.model, _ATTRIBUTE, self)
        self._forget_functions()

    def detach(self) -> None:
        """Gives the model Keras' own functions again, and its variables their classes."""
        for name in (*_OVERRIDES, _ATTRIBUTE):
            vars(self.model).pop(name, None)
        for variable in keras_variables(self.model):
            _release(variable)
        self._forget_functions()

    def fetch_all(self) -> None:
        """Brings every variable to this machine."""
        self._store.bring([vars(variable)["_value"] for variable in keras_variables(self.model)])

    def make_train_function(self, force: bool = False) -> Any:
        """As `keras.Model.make_train_function`, for the servers."""
        return self._make_function("train", force, self._over_batches)

    def make_test_function(self, force: bool = False) -> Any:
        """As `keras.Model.make_test_function`, for the servers."""
        return self._make_function("test", force, self._over_batches)

    def make_predict_function(self, force: bool = False) -> Any:
        """As `keras.Model.make_predict_function`, for the servers."""
        return self._make_function("predict", force, self._over_list)

    def step(self, kind: str) -> TensorFlowStep:
        """The step of a kind. Raises PlanError before its first call."""
        return require_step(self._steps, kind)

    def _forget_functions(self) -> None:
        self.model.train_function = self.model.test_function = self.model.predict_function = None

    def _make_function(self, kind: str, force: bool, over: Callable[[str, Any], Any]) -> Any:
        require_compiled_run(self.model)
        attribute = f"{kind}_function"
        if getattr(self.model, attribute) is None or force:
            self._steps[kind] = self._new_step(kind)
            self._traced.pop(kind, None)
            setattr(self.model, attribute, lambda data: over(kind, data))
        return getattr(self.model, attribute)

    def _new_step(self, kind: str) -> TensorFlowStep:
        options, builder = self._options, self._builder
        if kind != "train":
            options, builder = evaluation_options(options, is_trained=self._is_trained), None
        own = getattr(self.model, f"{kind}_step")

        def run(x: Any = _ABSENT, y: Any = _ABSENT, sample_weight: Any = _ABSENT, *, data: Any = _ABSENT) -> Any:
            return own(
                tuple(part for part in (x, y, sample_weight) if part is not _ABSENT) if data is _ABSENT else data
            )

        unconverted = tf.autograph.experimental.do_not_convert(run)  # nor does Keras convert it
        function = TensorFlowFunction(unconverted, f"{kind}_step", self._variable_paths)
        return TensorFlowStep(self.session, function, options, builder, self._progress)

    def _variable_paths(self) -> dict[int, str]:
        return {id(vars(variable)["_value"]): variable.path for variable in keras_variables(self.model)}

    def _over_batches(self, kind: str, batches: Iterator[Any]) -> Any:
        """Runs `steps_per_execution` steps; the logs of the last one. Raises StopIteration where there is no batch."""
        logs: Any = None
        for number in range(self.model.steps_per_execution):
            try:
                batch = next(batches)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number:
                    break
                raise StopIteration from None
            logs = self._run(kind, batch)
        return logs

    def _over_list(self, kind: str, batches: list[Any]) -> Any:
        outputs = [self._run(kind, batch) for batch in batches]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(list(map(tf.convert_to_tensor, parts)), 0), *outputs)

    def _run(self, kind: str, batch: Any) -> Any:
        batch = _without_optionals(batch)
        step = self._steps[kind]
        result = step(*batch) if isinstance(batch, tuple) and 1 <= len(batch) <= 3 else step(data=batch)
        if len(step.traces) != self._traced.get(kind):  # a trace may have made variables, such as an optimizer's
            self._traced[kind] = len(step.traces)
            for variable in keras_variables(self.model):
                _watch(variable, self._store)
        self._is_trained |= kind == "train"
        return result


def attach(
    model: Any,
    session: Session,
    *,
    options: PlanOptions,
    builder: Builder | None,
    progress: Callable[[PlanProgress], None] | None,
) -> Any:
    """See `shardwright.tensorflow.distribute`."""
    if keras.backend.backend() != "tensorflow":
        raise OptionError(
            f"Keras runs on {keras.backend.backend()!r}",
            where="KERAS_BACKEND",
            remedy="use shardwright.keras.distribute, or set KERAS_BACKEND=tensorflow before keras is first imported",
        )
    if not isinstance(model, keras.Model):
        raise OptionError(f"model is a {type(model).__name__}", where="model", remedy="pass a keras.Model")
    require_session(session)
    former = vars(model).get(_ATTRIBUTE)
    if former is not None and former.session is not session._state:
        former.fetch_all()
        former.detach()
    DistributedModel(model, session, options, builder, progress).attach()
    return model


def gather(model: Any) -> Any:
    """See `shardwright.tensorflow.gather`."""
    of_model = _distribution_of(model)
    of_model.fetch_all()
    of_model.detach()
    return model


def step_of(model: Any, kind: str) -> TensorFlowStep:
    """See `shardwright.tensorflow.step`."""
    return _distribution_of(model).step(kind)


def _distribution_of(model: Any) -> DistributedModel:
    hooks = vars(model).get(_ATTRIBUTE) if isinstance(model, keras.Model) else None
    if not isinstance(hooks, DistributedModel):
        raise OptionError(
            f"{getattr(model, 'name', None) or type(model).__name__} is not distributed",
            where="model",
            remedy="model = shardwright.tensorflow.distribute(model, session)",
        )
    return hooks


def _without_optionals(batch: Any) -> Any:
    """The batch with None for each empty `tf.experimental.Optional` of Keras' iterators."""
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)


# ---- variables that are fetched when they are read --------------------------------------------------


@cache
def _remote_class(kind: Any) -> type[Any]:
    """The subclass of a class of Keras' variables whose value is fetched when it is read, here and outside a trace."""

    def read(self: Any) -> Any:
        value = vars(self)["_value"]
        if value is not None and not tf.inside_function():
            vars(self)[_STORE].expose(value)
        return value

    def write(self: Any, value: Any) -> None:
        vars(self)["_value"] = value

    def assign(self: Any, value: Any) -> None:
        if tf.inside_function():
            kind._direct_assign(self, value)
            return
        variable = vars(self)["_value"]
        variable.assign(tf.cast(value, variable.dtype))
        vars(self)[_STORE].note_assigned(variable)

    members = {"_value": property(read, write), "_direct_assign": assign, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


def _watch(variable: Any, store: VariableStore) -> None:
    """Has a variable of Keras fetched when it is read."""
    if _STORE not in vars(variable):
        vars(variable)[_STORE] = store
        kind: Any = type(variable)
        variable.__class__ = _remote_class(kind)
        store.watch(vars(variable)["_value"])
    elif vars(variable)[_STORE] is not store:
        vars(variable)[_STORE] = store
        store.watch(vars(variable)["_value"])


def _release(variable: Any) -> None:
    if _STORE in vars(variable):
        variable.__class__ = type(variable).__mro__[1]
        del vars(variable)[_STORE]
