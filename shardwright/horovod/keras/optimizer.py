"""Horovod's optimizer of Keras, by its arguments: `sw.ranks.keras_optimizer` does the work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from shardwright.errors import OptionError
from shardwright.horovod.arguments import read_op, require_cast
from shardwright.horovod.errors import OptionValueError, as_value_errors
from shardwright.horovod.process_sets import global_process_set, resolve
from shardwright.ranks import Compression, ReduceOp, keras_optimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    num_groups: int = 0,
    groups: Any = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`optimizer` itself, which from now on steps with the gradients of all ranks: give it to `model.compile`.

    name, device_dense, device_sparse, sparse_as_dense, num_groups, groups, scale_local_gradients: without effect.
    Gradients go as one message a type, where they are, embeddings' as whole tables.
    """
    if num_groups:
        warnings.warn("num_groups is called groups", DeprecationWarning, stacklevel=2)
    with as_value_errors():
        return keras_optimizer.DistributedOptimizer(
            optimizer,
            op=read_op(op),
            compression=require_cast(compression),
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=resolve(process_set),
        )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedOptimizer`. Raises OptionValueError for local layers."""
    if local_layers:
        raise OptionValueError(
            "layers that keep their own gradients are not here",
            where="local_layers",
            remedy="train them with an optimizer of their own, in a step of your own",
        )
    return DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        0, groups, process_set=process_set,
    )  # fmt: skip


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[type] | Mapping[str, Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """A saved model, whose optimizer steps with the gradients of all ranks. options: of `DistributedOptimizer`.

    custom_optimizers: classes of optimizers that Keras does not know. legacy_opts: not used, Keras 2's are gone.
    """
    objects = dict(custom_objects or {})
    if isinstance(custom_optimizers, Mapping):
        objects |= custom_optimizers
    else:
        objects |= {kind.__name__: kind for kind in custom_optimizers or ()}
    if "process_set" in options:
        options["process_set"] = resolve(options["process_set"])
    with as_value_errors():
        return keras_optimizer.load_model(filepath, objects or None, compression=require_cast(compression), **options)


def broadcast_global_variables(root_rank: int = 0) -> NoReturn:
    """Raises OptionError: Keras 3 and TensorFlow 2 keep no list of all variables."""
    raise OptionError(
        "there is no list of all variables",
        where="broadcast_global_variables",
        remedy=f"hvd.broadcast_variables(model.weights, {root_rank}), or callbacks.BroadcastGlobalVariablesCallback",
    )
