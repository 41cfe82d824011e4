"""Variables that are types only, until their initializers run on the servers.

Inside a scope a variable of Keras stays as Keras itself keeps one that is made in a stateless scope: its type and its
initializer, without a value. Layers trace their shapes with it as ever. Afterwards `settle` makes all initializers one
program, and the variables hold handles of its results: nothing runs before they are needed, and then it runs in the
layouts of the step that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import keras
from keras.src.backend.jax.core import JaxVariable
from keras.src.backend.jax.trainer import JAXTrainer

from shardwright.client.initializer import PendingInit

if TYPE_CHECKING:
    from shardwright.client.step_queue import StepQueue


class Births:
    """The variables and the models made inside a scope."""

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self.models: list[Any] = []


def settle(steps: StepQueue, variables: Iterable[Any]) -> None:
    """Gives every variable without a value a handle of its initializer's result in a session."""
    waiting = [variable for variable in variables if variable._value is None and variable._initializer is not None]
    if not waiting:
        return
    types = [(variable._initializer, variable._shape, variable._dtype) for variable in waiting]
    handles = PendingInit(steps, _initializers(types), ()).handles()
    for variable, handle in zip(waiting, handles, strict=True):
        variable._value = handle
        variable._initializer = None


_births: ContextVar[Births | None] = ContextVar("shardwright_keras_births", default=None)


@contextmanager
def collect_births() -> Iterator[Births]:
    """While active in this thread, variables are made without values, and models are noted."""
    births = Births()
    token = _births.set(births)
    try:
        yield births
    finally:
        _births.reset(token)


def _initializers(types: Sequence[tuple[Callable[..., Any], Any, str]]) -> Callable[[], list[Any]]:
    def initialize() -> list[Any]:
        return [
            jax.lax.convert_element_type(jax.numpy.asarray(initializer(shape, dtype=dtype)), dtype)
            for initializer, shape, dtype in types
        ]

    return initialize


def _is_pure(initializer: Any) -> bool:
    """Whether its result depends on nothing but its own settings: it may run elsewhere, and more than once."""
    is_seeded = isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)
    return isinstance(initializer, keras.Initializer) and not is_seeded


# ---- Keras' own methods, which do as ever outside a scope ------------------------------------------

_initialize_here = JaxVariable._initialize_with_initializer
_initialize_deferred_here = JaxVariable._deferred_initialize
_make_trainer = JAXTrainer.__init__


def _initialize(self: Any, initializer: Any) -> None:
    births = _births.get()
    if births is None or not self._shape or self._layout is not None or not _is_pure(initializer):
        _initialize_here(self, initializer)
        return
    self._value = None
    self._initializer = initializer
    births.variables.append(self)


def _initialize_deferred(self: Any) -> None:
    births = _births.get()
    initializer = self._initializer
    if births is None or self._value is not None or not self._shape or not _is_pure(initializer):
        _initialize_deferred_here(self)
        return
    births.variables.append(self)


def _init_trainer(self: Any, *args: Any, **kwargs: Any) -> None:
    _make_trainer(self, *args, **kwargs)
    births = _births.get()
    if births is not None and all(model is not self for model in births.models):
        births.models.append(self)


JaxVariable._initialize_with_initializer = _initialize
JaxVariable._deferred_initialize = _initialize_deferred
JAXTrainer.__init__ = _init_trainer
