"""The same for Keras: an optimizer of `keras.optimizers` that steps with the gradients of all ranks.

On Keras' JAX backend a model that is compiled with one trains in `sw.ranks.jit`: gradients are exchanged in the
compiled step itself, while it computes. With `run_eagerly=True`, and on the PyTorch backend, they go as one message a
type. On the TensorFlow backend its graph calls out for that: XLA does not compile the step.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from shardwright.errors import OptionError
from shardwright.ranks import in_jit, operations
from shardwright.ranks.collectives import allreduce
from shardwright.ranks.compression import Cast
from shardwright.ranks.gradient_options import check_gradient_options
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import ProcessSet

_BACKENDS = ("jax", "torch", "tensorflow")


def DistributedOptimizer(
    optimizer: Any,
    *,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    compression: Cast | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Any:
    """`optimizer` itself, which from now on steps with the gradients of all ranks: give it to `model.compile`.

    Clipping and weight decay come after the exchange. A saved model holds the plain optimizer. A loss scale goes
    inside: `DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))`.

    compression: `Compression.fp16` or `bf16`. backward_passes_per_step: how many batches' gradients are added up by
    Keras (its `gradient_accumulation_steps`) before they are exchanged, once. average_aggregated_gradients: divide
    that sum by their number. gradient_predivide_factor: of an average, divides before the sum, and multiplies back
    after it.

    Raises OptionError for options that exclude each other.
    """
    op = operations.to_op(op)
    _check_backend()
    _check_options(optimizer, compression, backward_passes_per_step, op, gradient_predivide_factor)
    if backward_passes_per_step > 1:
        _accumulate(optimizer, backward_passes_per_step)
    base = type(optimizer)
    kind = _DistributedLossScale if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else _Distributed
    optimizer.__class__ = type(base.__name__, (kind, base), {"__module__": base.__module__})
    factor = 1 if average_aggregated_gradients else backward_passes_per_step
    exchange = _Exchange(op, compression, gradient_predivide_factor, factor, process_set)
    object.__setattr__(optimizer, "_exchange", exchange)  # no variable of Keras
    _train_between_ranks()
    return optimizer


def _check_backend() -> None:
    if keras.backend.backend() not in _BACKENDS:
        raise OptionError(
            f"Keras runs on {keras.backend.backend()!r}, whose tensors are not sent between ranks",
            where="KERAS_BACKEND",
            remedy="export KERAS_BACKEND=jax (or torch, tensorflow) before keras is first imported",
        )


def _check_options(optimizer: Any, compression: Any, passes: Any, op: ReduceOp, predivide: float) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        remedy = "keras.optimizers.SGD(0.1), say"
        raise OptionError(f"a {type(optimizer).__name__} is no optimizer of Keras", where="optimizer", remedy=remedy)
    if is_distributed(optimizer):
        raise OptionError("it is distributed already", where="optimizer", remedy="wrap it once")
    check_gradient_options("Keras", compression, passes, op, predivide)


def _accumulate(optimizer: Any, passes: int) -> None:
    """Have Keras add up the gradients of so many batches."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner.built or inner.gradient_accumulation_steps not in (None, passes):
        raise OptionError(
            f"{passes} for an optimizer that is {'built' if inner.built else 'to accumulate otherwise'}",
            where="backward_passes_per_step",
            remedy="wrap a new optimizer, and leave its gradient_accumulation_steps out",
        )
    inner.gradient_accumulation_steps = passes


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer, or one that it wraps, came from `DistributedOptimizer`."""
    return _find_exchange(optimizer) is not None


def _find_exchange(optimizer: Any) -> _Exchange | None:
    while optimizer is not None:
        if isinstance(optimizer, _Distributed | _DistributedLossScale):
            return optimizer._exchange
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


class _Exchange:
    """The gradients of all ranks, eagerly and traced. factor: of what Keras has averaged over batches."""

    def __init__(
        self, op: ReduceOp, compression: Cast | None, predivide: float, factor: int, process_set: ProcessSet | None
    ) -> None:
        self._op = op
        self._compression = compression
        self._predivide = predivide
        self._factor = factor
        self.process_set = process_set
        #: What a graph of TensorFlow calls.
        self.in_graphs: Any = None
        if keras.backend.backend() == "tensorflow":
            from shardwright.ranks.tensorflow_graphs import ArrayFunction

            self.in_graphs = ArrayFunction(self._reduce)

    def __call__(self, grads: Sequence[Any]) -> list[Any]:
        there = [index for index, grad in enumerate(grads) if grad is not None]
        reduced = (self.in_graphs or self._reduce)([grads[index] for index in there])
        results: list[Any] = list(grads)
        for index, grad in zip(there, reduced, strict=True):
            results[index] = grad
        return results

    def _reduce(self, grads: list[Any]) -> list[Any]:
        reduced: list[Any] = allreduce(
            grads,
            self._op,
            name="gradients",
            process_set=self.process_set,
            prescale_factor=self._factor / self._predivide,
            postscale_factor=self._predivide,
            compression=self._compression,
        )
        return reduced


class _Distributed:
    """What a distributed optimizer has ahead of its own class: Keras clips what has been accumulated, then steps."""

    _exchange: _Exchange
    _iterations: Any
    gradient_accumulation_steps: int | None

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        return super()._clip_gradients(self._exchanged(list(grads)))  # type: ignore[misc]

    def _exchanged(self, grads: list[Any]) -> list[Any]:
        steps = self.gradient_accumulation_steps
        if not steps or keras.backend.backend() != "jax":
            return self._exchange(grads)
        # Keras on JAX computes an update in every pass, and keeps the one of the last.
        is_last = (jnp.asarray(self._iterations.value) + 1) % steps == 0
        if not in_jit.is_traced([is_last]):
            return self._exchange(grads) if bool(is_last) else grads
        exchanged: list[Any] = jax.lax.cond(is_last, self._exchange, lambda own: own, grads)
        return exchanged


class _DistributedLossScale:
    """The same of an optimizer that scales the loss: all ranks see each other's overflows, and decide alike."""

    _exchange: _Exchange

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return super().apply(self._exchange(grads), trainable_variables)  # type: ignore[misc]

    def stateless_apply(self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
        exchanged = self._exchange(grads)
        return super().stateless_apply(optimizer_variables, exchanged, trainable_variables)  # type: ignore[misc]


# ---- the step --------------------------------------------------------------------
@functools.cache
def _train_between_ranks() -> None:
    """From now on `keras.Model` compiles steps with a distributed optimizer for all ranks; others as ever."""
    plain = keras.Model.make_train_function

    @functools.wraps(plain)
    def make_train_function(self: Any, force: bool = False) -> Any:
        exchange = _find_exchange(self.optimizer)
        if exchange is None:
            return plain(self, force)
        _check_model(self)
        if exchange.in_graphs is not None:
            return _make_graph(self, force, plain, exchange.in_graphs)
        if keras.backend.backend() != "jax" or self.run_eagerly or not self.jit_compile:
            return plain(self, force)
        if self.train_function is None or force:
            self.train_function = self._make_function(_step_of_ranks(self, exchange.process_set))
        return None

    keras.Model.make_train_function = make_train_function


def _check_model(model: Any) -> None:
    if not isinstance(model.optimizer, _Distributed | _DistributedLossScale):
        raise OptionError(
            "a loss scale around a distributed optimizer: ranks would skip steps each for itself",
            where="optimizer",
            remedy="DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))",
        )
    strategy = getattr(model, "distribute_strategy", None)  # TensorFlow's
    if keras.distribution.distribution() is not None or (strategy is not None and strategy.num_replicas_in_sync > 1):
        raise OptionError(
            "Keras distributes this model itself",
            where="keras.distribution",
            remedy="leave keras.distribution.set_distribution, or tf.distribute's scope, out, or DistributedOptimizer",
        )


def _step_of_ranks(model: Any, process_set: ProcessSet | None) -> Callable[[Any, Any], Any]:
    step = in_jit.jit(model.train_step, process_set=process_set, donate_argnums=0)

    def run(state: Any, data: Any) -> Any:
        return step(state, jax.tree.map(jnp.asarray, data))

    return run


def _make_graph(model: Any, force: bool, plain: Callable[[Any, bool], Any], in_graphs: Any) -> None:
    if model.train_function is None or force:
        if model.jit_compile:  # "auto" is that on GPUs
            model.jit_compile = False
        plain(model, True)
        model.train_function = in_graphs.raises_its_own(model.train_function)


# ---- checkpoints -----------------------------------------------------------------
def load_model(filepath: str | os.PathLike[str], custom_objects: Any = None, **options: Any) -> Any:
    """A saved model, whose optimizer steps with the gradients of all ranks. options: of `DistributedOptimizer`.

    `backward_passes_per_step` is what the model was saved with. Raises OptionError where it has no optimizer.
    """
    model = keras.saving.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        raise OptionError("this model was saved without an optimizer", where=str(filepath), remedy="compile it")
    DistributedOptimizer(model.optimizer, **options)
    return model
