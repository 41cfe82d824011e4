"""Horovod's names for elastic training with PyTorch: those of `shardwright.horovod.elastic`."""

from __future__ import annotations

from shardwright.horovod.elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
