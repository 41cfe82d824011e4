"""A Keras model whose steps run on servers: what takes the place of its jitted step functions.

Handles are arrays of JAX, so Keras' variables hold them as they are: between steps and epochs a variable's value is
where its step left it, and is fetched when it is read. What is assigned to a variable here is sent with the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from shardwright.client.array_operators import keep_handles
from shardwright.client.array_specs import array_spec
from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.keras.births import collect_births, settle
from shardwright.client.frontends.keras.function import KerasFunction, StatelessStep, batch_name
from shardwright.client.frontends.keras.layouts import Layouts, filter_pins, require_no_distribution
from shardwright.client.frontends.model_steps import evaluation_options, require_compiled_run, require_step
from shardwright.client.frontends.names import unique_names
from shardwright.client.frontends.sessions import require_session
from shardwright.client.initializer import PendingInit
from shardwright.client.step import Step
from shardwright.errors import OptionError
from shardwright.options.plan_options import PlanOptions

if TYPE_CHECKING:
    from shardwright.builders.base import Builder
    from shardwright.client.placement import Placement
    from shardwright.client.session import Session
    from shardwright.client.session_state import SessionState
    from shardwright.progress import PlanProgress

_RESULT_NAMES = {"train": "logs", "test": "logs", "predict": "outputs"}
_ATTRIBUTE = "_shardwright"
_OVERRIDES = (
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "jax_state_sync",
    "_purge_model_variables",
    "_symbolic_build",
)


@dataclass(slots=True)
class _StepOfKind:
    """One of a model's steps: its variables in groups, as Keras passes them, and its programs."""

    function: KerasFunction
    groups: tuple[tuple[Any, ...], ...]
    variables: tuple[Any, ...]
    names: tuple[str, ...]
    steps: dict[Any, Step] = field(default_factory=dict)


class DistributedModel:
    """The hooks of one model in one session."""

    def __init__(
        self,
        model: Any,
        session: Session,
        options: PlanOptions,
        builder: Builder | None,
        layouts: Layouts,
        progress: Callable[[PlanProgress], None] | None,
    ) -> None:
        self.model = model
        self.session: SessionState = session._state
        self._options = options
        self._builder = builder
        self._layouts = layouts
        self._progress = progress
        self._kinds: dict[str, _StepOfKind] = {}
        self._last: dict[str, Step] = {}
        self._is_trained = False

    # ---- attached to a model -------------------------------------------------------------------

    def attach(self) -> None:
        """Takes the place of Keras' functions in this very model; its class stays as it is."""
        model = self.model
        for name in _OVERRIDES:
            object.__setattr__(model, name, getattr(self, name))
        object.__setattr__(model, _ATTRIBUTE, self)
        model.train_function = model.test_function = model.predict_function = None

    def detach(self) -> None:
        """Gives the model Keras' own functions again."""
        for name in (*_OVERRIDES, _ATTRIBUTE):
            vars(self.model).pop(name, None)
        self.model.train_function = self.model.test_function = self.model.predict_function = None

    def make_train_function(self, force: bool = False) -> None:
        """As `keras.Model.make_train_function`, for the servers."""
        self._make_function("train", force)

    def make_test_function(self, force: bool = False) -> None:
        """As `keras.Model.make_test_function`, for the servers."""
        self._make_function("test", force)

    def make_predict_function(self, force: bool = False) -> Any:
        """As `keras.Model.make_predict_function`, for the servers."""
        return self._make_function("predict", force)

    def jax_state_sync(self) -> None:
        """Variables are up to date after every step. Their metrics are about to be read, in one round trip."""
        for variable in self.model.metrics_variables:
            if isinstance(variable._value, RemoteArray):
                variable._value.copy_to_host_async()
        self.model._jax_state_synced = True

    def _purge_model_variables(self, **groups: bool) -> None:
        """Handles take no memory here."""

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """As Keras' own; the variables that it makes, such as an optimizer's, are born on the servers."""
        with collect_births() as births, keep_handles():
            type(self.model)._symbolic_build(self.model, iterator=iterator, data_batch=data_batch)
        settle(self.session.steps, births.variables)

    def _make_function(self, kind: str, force: bool) -> Any:
        model = self.model
        require_compiled_run(model)
        attribute = f"{kind}_function"
        groups = groups_of(model, kind)
        current = self._kinds.get(kind)
        is_same = current is not None and all(
            len(old) == len(new) and all(map(_is, old, new)) for old, new in zip(current.groups, groups, strict=True)
        )
        function = getattr(model, attribute)
        if function is not None and is_same and not force:
            return function
        if function is None or not is_same or force:
            self._kinds[kind] = step_of_kind(model, kind, groups)

        def run(state: Any, data: Any) -> Any:
            del state  # what the variables hold counts, also what a callback has assigned meanwhile
            return self._run(kind, data)

        setattr(model, attribute, model._make_function(run, concatenate_outputs=kind == "predict"))
        return getattr(model, attribute)

    # ---- steps -----------------------------------------------------------------------------

    def _run(self, kind: str, data: Any) -> tuple[Any, tuple[list[Any], ...]]:
        """One step over what the variables hold; they hold its results afterwards."""
        of_kind = self._kinds[kind]
        data = strip_trailing_nones(data)
        if kind != "train":
            self._upload_weights(of_kind)
        values = self._values_of(of_kind.variables)
        step = self._step_for(kind, data)
        changed, rest = step(values, data)
        for number, handle in changed.items():
            of_kind.variables[number]._value = handle
        self._is_trained |= kind == "train"
        return rest, tuple([variable._value for variable in group] for group in of_kind.groups)

    def _values_of(self, variables: Sequence[Any]) -> list[Any]:
        """What a step takes of each variable: a handle of this session, each once, or a numpy array."""
        values: list[Any] = []
        handle_ids: set[int] = set()
        for variable in variables:
            value = variable._value
            if not isinstance(value, RemoteArray):
                value = local_value(variable)
            elif value._store is not self.session.arrays:
                value = np.asarray(value)
            elif id(value) in handle_ids:  # assigned from another variable, as averages of weights are
                (value,) = self.session.steps.move([value.block_until_ready()], [_placement(value)])
            handle_ids.add(id(value))
            values.append(value)
        return values

    def _upload_weights(self, of_kind: _StepOfKind) -> None:
        """Sends what a step only reads once, not with each batch."""
        waiting = [
            variable
            for group in of_kind.groups[:2]
            for variable in group
            if not (isinstance(variable._value, RemoteArray) and variable._value._store is self.session.arrays)
        ]
        if not waiting:
            return
        values = tuple(local_value(variable) for variable in waiting)
        handles = PendingInit(self.session.steps, lambda *arrays: arrays, values).handles()
        for variable, handle in zip(waiting, handles, strict=True):
            variable._value = handle

    def _step_for(self, kind: str, data: Any) -> Step:
        of_kind = self._kinds[kind]
        leaves, tree = tree_flatten_with_path(data)
        key = (tree, self._is_trained or kind == "train")
        if key not in of_kind.steps:
            names = [*of_kind.names, *(batch_name("data" + keystr(path)) for path, _ in leaves)]
            options = self._options_for(kind, of_kind, names)
            builder = self._builder if kind == "train" else None
            of_kind.steps[key] = Step(self.session, of_kind.function, options, self._progress, builder)
        self._last[kind] = of_kind.steps[key]
        return of_kind.steps[key]

    def _options_for(self, kind: str, of_kind: _StepOfKind, names: Sequence[str]) -> PlanOptions:
        """The user's options for a training step, with layouts as pins.

        Evaluation steps are planned around the state of a trained model; before training, under the pins of their
        variables.
        """
        options = self._options
        if options.mesh is None and self._layouts.mesh is not None and not options.plan_json:
            options = replace(options, mesh=self._layouts.mesh)
        pins = filter_pins(self._layouts.pins(of_kind.names, of_kind.variables, of_kind.groups[0]), names)
        force = options.force
        if kind != "train":
            own = {} if force is None or isinstance(force, str) else filter_pins(force, names)
            force = force if isinstance(force, str) and not self._is_trained else {**pins, **own}
            return evaluation_options(replace(options, force=force or None), is_trained=self._is_trained)
        if self._builder is None and not isinstance(force, str) and not options.plan_json:
            return replace(options, force={**pins, **(force or {})} or None)
        if pins:
            origin = "plan= says it of all variables" if options.plan_json else ""
            raise OptionError(
                f"{origin or f'force={self._builder or force!r} is a strategy of its own'}, layouts= another",
                where="layouts",
                remedy="leave one of them out",
            )
        return options

    def step(self, kind: str) -> Step:
        """The latest step of a kind. Raises PlanError before its first call."""
        return require_step(self._last, kind)

    # ---- state -----------------------------------------------------------------------------

    def fetch_all(self) -> None:
        """Brings every variable to this machine."""
        remote = [variable for variable in all_variables(self.model) if isinstance(variable._value, RemoteArray)]
        for variable in remote:
            variable._value.copy_to_host_async()
        for variable in remote:
            variable._value = jax.numpy.asarray(np.asarray(variable._value))


def distribution_of(model: Any) -> DistributedModel:
    """The hooks of a model. Raises OptionError on one that runs here."""
    distribution = vars(model).get(_ATTRIBUTE) if isinstance(model, keras.Model) else None
    if distribution is None:
        raise OptionError(
            f"{getattr(model, 'name', None) or type(model).__name__} is not distributed",
            where="model",
            remedy="model = shardwright.keras.distribute(model, session)",
        )
    return distribution  # type: ignore[no-any-return]


def attach(
    model: Any,
    session: Session,
    options: PlanOptions,
    builder: Builder | None,
    *,
    layouts: Any,
    progress: Callable[[PlanProgress], None] | None,
) -> None:
    """Makes a model's steps run in a session. Raises OptionError on what is no model, and on wrong layouts."""
    if not isinstance(model, keras.Model):
        raise OptionError(f"model is a {type(model).__name__}", where="model", remedy="pass a keras.Model")
    require_session(session)
    require_no_distribution()
    former = vars(model).get(_ATTRIBUTE)
    if former is not None and former.session is not session._state:
        former.fetch_all()
    settle(session._state.steps, all_variables(model))
    DistributedModel(model, session, options, builder, Layouts(layouts), progress).attach()


# ---- Keras' steps as functions of values ---------------------------------------------------------


def groups_of(model: Any, kind: str) -> tuple[tuple[Any, ...], ...]:
    """The variables of a step, in the groups that Keras passes."""
    groups = [model.trainable_variables, model.non_trainable_variables]
    if kind == "train":
        optimizer = getattr(model, "optimizer", None)  # before it is compiled there is none
        groups.append([] if optimizer is None else optimizer.variables)
    if kind != "predict":
        groups.append(model.metrics_variables)
    return tuple(map(tuple, groups))


def step_of_kind(model: Any, kind: str, groups: tuple[tuple[Any, ...], ...]) -> _StepOfKind:
    """Keras' train, test or predict step of a model, to be lowered."""
    variables = tuple(variable for group in groups for variable in group)
    names = unique_names([variable.path for variable in variables])
    function = KerasFunction(
        f"{kind}_step",
        _stateless(model, kind, [len(group) for group in groups]),
        names,
        result_name=_RESULT_NAMES[kind],
        updates_all=kind == "train",
    )
    return _StepOfKind(function, groups, variables, names)


def _stateless(model: Any, kind: str, sizes: Sequence[int]) -> StatelessStep:
    def run(values: Sequence[Any], data: Any) -> tuple[list[Any], Any]:
        rest = iter(values)
        state = tuple([next(rest) for _ in range(size)] for size in sizes)
        if kind == "predict":
            outputs, non_trainable = model.predict_step(state, data)
            return [*state[0], *non_trainable], outputs
        logs, new = (model.train_step if kind == "train" else model.test_step)(state, data)
        return [value for group in new for value in group], logs

    return run


def all_variables(model: Any) -> list[Any]:
    """A model's variables, its optimizer's and its metrics', each once."""
    variables: dict[int, Any] = {}
    for group in groups_of(model, "train"):
        variables.update({id(variable): variable for variable in group})
    return list(variables.values())


def strip_trailing_nones(data: Any) -> Any:
    """Strip the `None`s at the end of a batch: they mean the same as their absence."""
    while isinstance(data, tuple) and len(data) > 1 and data[-1] is None:
        data = data[:-1]
    return data


def variable_types(variables: Sequence[Any]) -> list[Any]:
    """Types of variables, with or without values."""
    return [array_spec(tuple(variable.shape), np.dtype(variable._dtype)).aval for variable in variables]


def local_value(variable: Any) -> np.ndarray:
    """The value of a variable on this machine."""
    if variable._value is None:
        variable._value = variable.value
        variable._initializer = None
    return np.asarray(variable._value)


def _placement(handle: RemoteArray) -> Placement:
    assert handle._place is not None  # it is ready
    return handle._place


def _is(one: Any, other: Any) -> bool:
    return one is other
