"""Keras models that train on servers, on Keras' JAX backend.

    model = shardwright.keras.distribute(model, session)
    model.compile(...); model.fit(...); model.save("m.keras")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.client.frontends.keras.backend import require_jax_backend
from shardwright.options.user_options import UserOptions, plan_options, show_options

require_jax_backend()

from shardwright.client.frontends.keras import births, training  # noqa: E402

if TYPE_CHECKING:
    from shardwright.client.session import Session
    from shardwright.progress import PlanProgress


@show_options
def distribute(
    model: Any,
    session: Session,
    *,
    layouts: Any = None,
    progress: Callable[[PlanProgress], None] | None = None,
    **options: Unpack[UserOptions],
) -> Any:
    training.attach(model, session, plan_options(**options), layouts=layouts, progress=progress)
    return model


@contextmanager
def scope(session, *, layouts=None, progress=None, **options) -> Iterator[None]:
    with births.collect_births() as born:
        yield
    born.settle(session._state)
    for model in born.models:
        training.attach(model, session, plan_options(**options), layouts=layouts, progress=progress)
