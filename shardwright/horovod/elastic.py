"""Horovod's names for `sw.ranks.elastic`: `hvd.elastic.run`, `hvd.elastic.TorchState(model=…, epoch=0)`."""

from __future__ import annotations

from shardwright.ranks.elastic import ElasticSampler, State, run

#: One class holds what Horovod has a class a framework for.
ObjectState = TorchState = KerasState = TensorFlowState = TensorFlowKerasState = State

__all__ = [
    "ElasticSampler", "KerasState", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "TorchState",
    "run",
]  # fmt: skip
