"""Horovod's callbacks of Keras: `hvd.callbacks.MetricAverageCallback()`."""

from __future__ import annotations

from shardwright.ranks.keras_callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
