"""Horovod's names for elastic training with TensorFlow: those of `shardwright.horovod.elastic`."""

from __future__ import annotations

from shardwright.horovod.elastic import TensorFlowKerasState, TensorFlowState, run

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]
