"""Gradients of TensorFlow from all ranks: of a tape, eagerly and in graphs, and of optimizers of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.errors import OptionError
from shardwright.horovod.arguments import read_op, require_cast
from shardwright.horovod.errors import OptionValueError
from shardwright.horovod.keras.optimizer import DistributedOptimizer as of_keras
from shardwright.horovod.process_sets import global_process_set, resolve
from shardwright.ranks import Compression, ReduceOp, allreduce
from shardwright.ranks.tensorflow_graphs import ArrayFunction


class _DistributedTape:
    """What a distributed tape has ahead of `tf.GradientTape`."""

    _exchange: ArrayFunction

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """The gradients of all ranks; those of embeddings as whole tables."""
        gradients = super().gradient(target, sources, *args, **kwargs)  # type: ignore[misc]
        leaves = tf.nest.flatten(gradients)
        there = [index for index, leaf in enumerate(leaves) if leaf is not None]
        for index, leaf in zip(there, self._exchange([leaves[index] for index in there]), strict=True):
            leaves[index] = leaf
        return tf.nest.pack_sequence_as(gradients, leaves) if isinstance(gradients, list | tuple | dict) else leaves[0]


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`gradtape` itself, whose `gradient` from now on is that of all ranks.

    device_dense, device_sparse, sparse_as_dense, num_groups, groups, scale_local_gradients: without effect.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise OptionError(f"a {type(gradtape).__name__} is no tf.GradientTape", where="gradtape")
    chosen, cast, members = read_op(op), require_cast(compression), resolve(process_set)
    if gradient_predivide_factor != 1.0 and chosen is not ReduceOp.AVERAGE:
        raise OptionValueError(
            f"{gradient_predivide_factor!r} with op={chosen.value!r}",
            where="gradient_predivide_factor",
            remedy="it divides averages",
        )

    def reduce(arrays: list[np.ndarray]) -> list[np.ndarray]:
        reduced: list[np.ndarray] = allreduce(
            arrays,
            chosen,
            name="gradients",
            process_set=members,
            prescale_factor=1 / gradient_predivide_factor,
            postscale_factor=gradient_predivide_factor,
            compression=cast,
        )
        return reduced

    base = type(gradtape)
    gradtape.__class__ = type(base.__name__, (_DistributedTape, base), {"__module__": base.__module__})
    gradtape._exchange = ArrayFunction(reduce)
    return gradtape


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Sequence[Any] | int | None = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Keras' optimizer, which from now on steps with the gradients of all ranks; TensorFlow 1's are refused."""
    return of_keras(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        num_groups, groups, backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, process_set=process_set,
    )  # fmt: skip
