"""Horovod's names for `sw.ranks.elastic`: `hvd.elastic.run`, `hvd.elastic.TorchState(model=…, epoch=0)`."""

from __future__ import annotations

from typing import Any

from shardwright.ranks.elastic import ElasticSampler, State, run

#: One class holds what Horovod has a class a framework for.
ObjectState = TensorFlowState = State


class _ModelState(State):
    """A state whose first two values may be given by position: a model, which has to be built, and its optimizer."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        named = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in named.items() if value is not None}, **values)


TorchState = KerasState = TensorFlowKerasState = _ModelState

__all__ = [
    "ElasticSampler", "KerasState", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "TorchState",
    "run",
]  # fmt: skip
