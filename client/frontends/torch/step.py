"""`shardwright.torch.parallelize`: a training step of a module on the servers."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch.utils import _pytree

from shardwright.builders.base import Builder
from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.planned_step import PlannedStep
from shardwright.client.frontends.torch.batch import TENSOR, Batch, BatchReader
from shardwright.client.frontends.torch.binding import BoundStep, leaves_gradients, record_events
from shardwright.client.frontends.torch.buckets import Bucket, require_arguments
from shardwright.client.frontends.torch.captured import CapturedState, clear_traced_gradients, versions_of
from shardwright.client.frontends.torch.checks import Outcome, Outcomes
from shardwright.client.frontends.torch.counters import Counter, list_counters, name_counters
from shardwright.client.frontends.torch.following import as_they_are, traced_over
from shardwright.client.frontends.torch.function import Call, TorchFunction
from shardwright.client.frontends.torch.optimizers import (
    refuse_inner_state,
    require_apart,
    require_optimizer,
    without_decisions,
)
from shardwright.client.frontends.torch.places import Place
from shardwright.client.frontends.torch.reads import Reads, Write, replay
from shardwright.client.frontends.torch.remote import RemoteTensor
from shardwright.client.frontends.torch.scaling import require_scaler, scaler_settings
from shardwright.client.frontends.torch.selections import refuse_selections
from shardwright.client.frontends.torch.settings import Setting, Settings
from shardwright.client.frontends.torch.single_process import as_one_rank, require_one_rank, unwrap
from shardwright.client.frontends.torch.state import RANDOM, StateGroup, require_plain, use_seed
from shardwright.client.frontends.torch.tracing import (
    Decisions,
    Graph,
    TensorType,
    list_captured,
    list_size_symbols,
    trace,
)
from shardwright.client.frontends.torch.training_state import TrainingState
from shardwright.client.step import Step
from shardwright.errors import ArgumentError, OptionError
from shardwright.options.plan_options import PlanOptions
from shardwright.options.user_options import UserOptions, show_options

if TYPE_CHECKING:
    import os

    from shardwright.client.checkpoints import Save
    from shardwright.client.frontends.program import Program
    from shardwright.client.plan_changes import PlanChange
    from shardwright.client.session import Session
    from shardwright.client.step_trace import StepTrace
    from shardwright.progress import PlanProgress
    from shardwright.user_plans import PipelinePlan, Plan

_SECOND_PARAMETER = ("optimizer", "optimizers", "optim", "opt")


class TorchStep(PlannedStep):
    """A step of a module on the servers; made by `parallelize`.

    The first call traces, plans, compiles and loads a program; later calls of the same shapes run it. Parameters,
    buffers, the optimizer's state and the random key live on the servers. They are fetched when the module or the
    optimizer here is read, and sent again where they were written to.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        optimizers: Sequence[Any],
        function: Callable[..., Any],
        *,
        is_whole: bool,
        is_sequence: bool,
        options: PlanOptions,
        builder: Builder | None,
        init: Callable[[Any], Any] | None,
        scaler: Any,
        buckets: Sequence[Bucket],
        progress: Callable[[PlanProgress], None] | None,
    ) -> None:
        self._session = session._state
        self._passed, model = model, unwrap(model)
        self._model = model
        self._optimizers = list(optimizers)
        self._function = function
        self._is_whole = is_whole
        self._is_sequence = is_sequence
        self._scaler = scaler
        self._buckets = tuple(buckets)
        name = getattr(function, "__name__", "step")
        self.name = name if name.isidentifier() else "step"
        self._front_end = TorchFunction(self.name)
        self._step = Step(self._session, self._front_end, options, progress, builder)
        self._evaluation_end = TorchFunction(f"{self.name}_evaluation")
        reading = replace(options.without_trials(), plan_json="")  # where the state lies
        self._evaluation = Step(self._session, self._evaluation_end, reading, progress)
        self._settings = Settings(self._optimizers)
        self._keys: dict[Hashable, list[int]] = {}
        self._count = 0
        self._decisions: dict[int, Decisions] = {}
        self._trees: dict[Hashable, Any] = {}
        self._batches = BatchReader(function, skip=1 + is_whole)
        self._reads = Reads(function, model, optimizers)
        self._captured = CapturedState(self._session)
        self._graphs: dict[int, Graph] = {}
        self._constants: dict[int, list[tuple[Any, int]]] = {}
        self._writes: dict[Hashable, list[Write]] = {}
        self._outcomes = Outcomes()
        self._session.readers.append(weakref.WeakMethod(self._outcomes.tell))
        self._state = TrainingState(self._session, model, self._optimizers, scaler, is_sequence=is_sequence, init=init)

    # ---- calls -----------------------------------------------------------------------------

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """One step; returns what the function returns, with a RemoteTensor in place of each tensor.

        Does not wait for the result. batch: tensors, arrays and numbers, nested as you like. A float is an argument of
        the program; any other number, string or flag is part of it, and another value makes another program.

        Raises ArgumentError: an argument that no program takes. UnsupportedProgramError: see `parallelize`.
        """
        return self._run(self._step, batch, named, is_training=bool(self._optimizers))[1]

    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """The loss function on the state as it is: modules in `eval()`, no gradients, nothing updated.

        Raises OptionError where the step was made of a whole training step, which has no loss function by itself.
        """
        if self._is_whole:
            raise OptionError(
                "the whole step was passed, and there is no loss function to evaluate",
                where="evaluate",
                remedy="parallelize(session, model, None, evaluate): it shares the model's state",
            )
        with _evaluating(self._state.model.modules):
            return self._run(self._evaluation, batch, named, is_training=False)[1]

    def measure(self, *batch: Any, **named: Any) -> tuple[Any, StepTrace]:
        """A measured call, waited for; see `Step.measure`."""
        return self._run(self._step, batch, named, is_training=bool(self._optimizers), how=Step.measure)

    def trace(self, path: str | os.PathLike[str], /, *batch: Any, **named: Any) -> Any:
        """A measured call, written for ui.perfetto.dev; see `Step.trace`."""
        run = lambda step, call: step.trace(path, call)  # noqa: E731
        return self._run(self._step, batch, named, is_training=bool(self._optimizers), how=run)[1]

    def compile(self, *batch: Any, **named: Any) -> Plan | PipelinePlan:
        """Plans, compiles and loads the program of a call without running it. Takes `jax.ShapeDtypeStruct`s, too."""
        call, _ = self._call(batch, named, bool(self._optimizers), announcing=self._step)
        return self._step.compile(call)

    def lower(self, *batch: Any, **named: Any) -> Program:
        """The HLO text of a call, with names of arguments and results; nothing is sent. Tensors may be on `meta`."""
        call, _ = self._call(batch, named, bool(self._optimizers), takes_types=True)
        return self._step.lower(call)

    @show_options
    def replan(self, **options: Unpack[UserOptions]) -> Plan | PipelinePlan:
        """Plans the training step again under changed options, and moves its state; see `Step.replan`."""
        return self._step.replan(**options)

    @property
    def plan_changes(self) -> tuple[PlanChange, ...]:
        """What became of the step's plans; see `Step.plan_changes`."""
        return self._step.plan_changes

    def dump(self, directory: str | os.PathLike[str]) -> Any:
        """Writes the servers' form of the first program; see `Step.dump`."""
        return self._step.dump(directory)

    def __repr__(self) -> str:
        return f"Torch{self._step!r}"

    def _run(
        self, step: Step, batch: Any, named: Any, *, is_training: bool, how: Callable[..., Any] | None = None
    ) -> tuple[Any, Any]:
        """(measurement or None, result)."""
        call, groups = self._call(batch, named, is_training, announcing=step)
        outcome = how(step, call) if how is not None else step(call)
        outputs, measured = outcome if isinstance(outcome, tuple) else (outcome, None)
        end = self._front_end if step is self._step else self._evaluation_end
        traced = end.traced[call.signature]
        places = [(n, name) for n, group in enumerate(groups) for name in group.names] + [(0, RANDOM)]
        numbers = [*traced.changed, *([call.state_count] if traced.draws else [])]
        news: dict[int, dict[str, RemoteArray]] = {}
        for number, handle in zip(numbers, outputs, strict=False):
            group, name = places[number]
            news.setdefault(group, {})[name] = handle
        self._state.take(news, groups)
        if traced.draws:
            self._state.model.draws = True
            use_seed()
        tree, leaves, gradient_types, lost = self._trees[call.key]
        arrays = iter(outputs[len(numbers) :])
        outcome = Outcome(next(arrays), call.graph.checks) if traced.has_checks else None
        if is_training:
            self._state.keep_gradients(gradient_types, arrays, lost)
        replay(self._writes.get(call.key, ()), call.graph.decisions.symbols, call.numbers)
        self._state.write_numbers()
        filled = [RemoteTensor(next(arrays), outcome) if leaf is TENSOR else leaf for leaf in leaves]
        result = _pytree.tree_unflatten(filled, tree)
        if outcome is not None:
            self._outcomes.add(outcome)
        return (result, measured) if how is Step.measure else (measured, result)

    def _call(
        self, batch: Any, named: Any, is_training: bool, *, takes_types: bool = False, announcing: Step | None = None
    ) -> tuple[Call, list[Any]]:
        """One call, and the owners of its state in order. announcing: what says that a trace goes on; None: nothing."""
        self._state.require(takes_types=takes_types, takes_gradients=is_training and self._is_whole)
        groups: list[StateGroup] = [self._state.model]
        if is_training:
            groups += self._state.optimizers
            groups += [self._state.scaler] if self._state.scaler is not None else []
            groups += [self._state.model.gradients] if self._is_whole else []
        if is_training and not self._is_whole:
            _require_gradients(self.name)
        reads, kind = self._reads.read(self._state.model.list_hooks())
        self._captured.require(self._reads.tensors)
        groups.append(self._captured)
        arguments = self._batches.read(batch, named, takes_types=takes_types)
        if is_training:
            require_arguments(self._buckets, arguments.tensor_names)
        arguments.pad(self._buckets)
        settings, constants = self._settings.read() if is_training else ({}, ())
        setting_names = self._settings.names(list(settings), is_sequence=self._is_sequence)
        counters = list_counters(self._state.optimizers) if is_training else []
        numbers = [*settings.values(), *(counter.value for counter in counters), *reads.values(), *arguments.numbers]
        names = [name for group in groups for name in group.names]
        types: list[TensorType | None] = [kind for group in groups for kind in group.types.values()]
        state_count = len(names)
        names += [RANDOM, *setting_names, *name_counters(counters, self._state.optimizers)]
        names += [*(place.name for place in reads), *arguments.number_names]
        names += arguments.tensor_names
        types += [None, *map(_number_type, numbers), *arguments.types]
        leaves: list[Any] = [group.values.get(name) for group in groups for name in group.names]
        leaves += [self._state.model.values.get(RANDOM), *map(_number, numbers), *arguments.values]
        with as_they_are():
            require_gradients = tuple(tensor.requires_grad for tensor in self._state.model.tensors.values())
        key = (
            is_training,
            kind,
            tuple(module.training for module in self._state.model.modules),
            require_gradients,
            self._state.layout,
            torch.is_grad_enabled(),
            constants,
            tuple((counter.optimizer, counter.members) for counter in counters),
            scaler_settings(self._scaler) if is_training and self._scaler is not None else (),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            tuple(names),
            tuple(types),
            arguments.key,
        )
        number = self._number_of(key, numbers)
        graph = self._graphs.get(number)
        if graph is None:
            with announcing.announce("trace") if announcing is not None else contextlib.nullcontext():
                graph = self._trace(
                    number, groups, arguments, numbers, list(settings), counters, list(reads), is_training
                )
                has_news = graph is not None and self._capture(number, graph)
                if graph is None or has_news or self._reads.has_news:
                    self._forget(key, number)
                    return self._call(batch, named, is_training, takes_types=takes_types, announcing=announcing)
            self._graphs[number] = graph
        return Call(number, leaves, tuple(names), tuple(types), state_count, tuple(numbers), graph), groups

    def _capture(self, number: int, graph: Graph) -> bool:
        """Whether a trace has read tensors beside its arguments that are state from now on."""
        captured = list_captured(graph)
        clear_traced_gradients([*captured, *self._captured.tensors.values()])
        has_news = self._captured.add(captured, self._reads.tensors)
        self._constants[number] = versions_of(captured)
        return has_news

    def _forget(self, key: Hashable, number: int) -> None:
        """A trace that has shown that it takes other arguments."""
        self._reads.has_news = False
        self._keys[key].remove(number)
        for table in (self._trees, self._writes, self._decisions, self._constants):
            table.pop(number, None)

    def _number_of(self, key: Hashable, numbers: Sequence[float]) -> int:
        """Stands for the key, whose hash takes time, and for what the step decides by its numbers."""
        alike = self._keys.setdefault(key, [])
        for number in alike:
            if number not in self._decisions or self._decisions[number].hold(numbers):
                if all(tensor._version == version for tensor, version in self._constants.get(number, ())):
                    return number
                alike.remove(number)  # it holds tensors by value that have changed since
                break
        self._count += 1
        alike.append(self._count)
        return alike[-1]

    # ---- tracing -----------------------------------------------------------------------------

    def _trace(
        self, key: int, groups: Sequence[StateGroup], arguments: Batch, numbers: Sequence[float],
        settings: Sequence[Setting], counters: Sequence[Counter], reads: Sequence[Place], is_training: bool,
    ) -> Graph | None:  # fmt: skip
        kinds = [kind for group in groups for kind in group.types.values()]
        count = len(kinds)
        own = count - len(self._captured.types)

        def step(values: list[Any]) -> list[Any]:
            state, rest = values[:count], values[count:]
            captured = state[own:]
            changing, rest = dict(zip(settings, rest, strict=False)), rest[len(settings) :]
            counts, rest = dict(zip(counters, rest, strict=False)), rest[len(counters) :]
            symbols, rest = dict(zip(reads, rest, strict=False)), rest[len(reads) :]
            args, kwargs = arguments.fill(rest)
            bound = BoundStep(
                self._model, self._state.model, self._optimizers, self._state.optimizers, state, changing, counts,
                self._scaler if is_training else None,
            )  # fmt: skip
            if not is_training:
                bound.optimizers = []
            with (
                self._reads.bind(symbols, self.name, self._captured.places) as writes,
                bound.swap_tensors(),
                traced_over(group.mirror for group in groups[:-1]),
                torch.set_grad_enabled(is_training and torch.is_grad_enabled()),
                record_events(self._model, self._optimizers) as events,
                as_one_rank(self._passed, self._function),
                refuse_inner_state(self._optimizers),
            ):
                result = self._body(args, kwargs, is_training)
                all_gradients = bound.gradients()
                gradients = all_gradients if self._is_whole and leaves_gradients(events) else {}
                after = bound.read(gradients)
                captured = self._captured.after_step(captured, self._reads, self.name)
                of_optimizers, constants = bound.list_writes()
            for setting in constants:
                self._settings.make_changing(setting)
                self._reads.has_news = True
            self._writes[key] = [*writes, *of_optimizers]
            lost = [name for name in all_gradients if name not in gradients]
            leaves, tree = _pytree.tree_flatten(result)
            refuse_selections(leaves)
            kinds = {name: TensorType(tuple(g.shape), g.dtype) for name, g in gradients.items()}
            self._trees[key] = tree, [TENSOR if _is_tensor(leaf) else leaf for leaf in leaves], kinds, lost
            new_gradients = [gradient for name, gradient in gradients.items() if name not in bound.gradients_before]
            return [*after, *captured, *new_gradients, *(_as_output(leaf) for leaf in leaves if _is_tensor(leaf))]

        before = set(self._state.model.gradients.names)
        try:
            graph = trace(
                step, [*kinds, *numbers, *arguments.types], state_count=count, model=self._model,
                optimizers=self._optimizers, name=self.name,
                captured=dict(enumerate(self._captured.tensors.values(), own)),
            )  # fmt: skip
        except Exception:
            if not reads:
                raise
            self._fix(reads)
            return None
        sizes = list_size_symbols(graph)
        of_reads = zip(graph.decisions.symbols[len(settings) + len(counters) :], reads, strict=False)
        deciding = [place for symbol, place in of_reads if symbol in sizes]
        if deciding:
            self._fix(deciding)
            return None
        self._decisions[key] = graph.decisions
        return replace(graph, new_state=tuple(name for name in self._trees[key][2] if name not in before))

    def _fix(self, places: Sequence[Place]) -> None:
        """Numbers that decide about sizes, or that the step takes by value only: each value has a program."""
        for place in places:
            self._reads.fix(place)
        self._reads.has_news = True

    def _body(self, args: Sequence[Any], kwargs: Mapping[str, Any], is_training: bool) -> Any:
        if self._is_whole:
            optimizers = self._optimizers if self._is_sequence else self._optimizers[0]
            with without_decisions(self._optimizers):
                return self._function(self._passed, optimizers, *args, **kwargs)
        if not is_training:
            return self._function(self._passed, *args, **kwargs)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        result = self._function(self._passed, *args, **kwargs)
        loss = _loss_of(result, self.name)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        with without_decisions(self._optimizers):
            for optimizer in self._optimizers:
                optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
        return result

    # ---- state -------------------------------------------------------------------------------

    def sync(self) -> None:
        """Writes the servers' values into what is here: the module's parameters and buffers, the optimizers' state, and
        the scale of a gradient scaler. Reading any of them does so by itself, but for the scale.
        """
        self._state.sync()

    def state_dict(self) -> dict[str, Any]:
        """The state, fetched, in PyTorch's format.

        `model`: for `model.load_state_dict`. `optimizer`: for `optimizer.load_state_dict`; a list of several. `scaler`:
        for `scaler.load_state_dict`. `random`: the key of random draws.
        """
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Replaces the state by that of `state_dict`, or by `{"model": …, "optimizer": …}` of plain PyTorch.

        What is not in it stays. The module and the optimizers here take the values as well.
        """
        self._state.load_state_dict(state, strict=strict)

    def export(self, path: str | os.PathLike[str], *batch: Any, **named: Any) -> None:
        """Writes what plain PyTorch or JAX load without this package, by the suffix of `path`.

        - `.pt`, `.pth`: `state_dict()`, for `torch.load`.
        - `.safetensors`: parameters and buffers of the module, for `safetensors.torch.load_model`.
        - `.stablehlo`: the step of these arguments, for `jax.export.deserialize` under `jax_enable_x64`; a function of
          `(state, inputs)`, two dicts by the names above, that returns `(changed state, results)`. The arguments may be
          tensors on `meta`. A `.safetensors` of the state goes with it.

        Raises OptionError on another suffix.
        """
        from shardwright.client.frontends.torch.exports import export_step, write_safetensors

        path = Path(path)
        if path.suffix in (".pt", ".pth"):
            torch.save(self.state_dict(), path)
        elif path.suffix == ".safetensors":
            self._state.sync()
            write_safetensors(self._model, path)
        elif path.suffix == ".stablehlo":
            call, _ = self._call(batch, named, bool(self._optimizers), takes_types=True)
            path.write_bytes(export_step(call, self._session.info.platform))
        else:
            raise OptionError(
                f"{path.name} has the suffix {path.suffix!r}",
                where="path",
                remedy=".pt for the state, .safetensors for the module's tensors, .stablehlo for the step",
            )

    def save(
        self, directory: str | os.PathLike[str], *, step: int | None = None, max_to_keep: int | None = None
    ) -> Save:
        """Writes the state to a checkpoint on the servers' file system; see `Session.save`."""
        return self._state.save(directory, step=step, max_to_keep=max_to_keep)

    def restore(self, directory: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Takes the state from a checkpoint of `save`; see `Session.restore`."""
        self._state.restore(directory, step=step)


def parallelize(
    session: Session,
    model: Any,
    optimizer: Any,
    function: Callable[..., Any] | None,
    *,
    options: PlanOptions,
    builder: Builder | None = None,
    is_whole: bool | None = None,
    init: Callable[[Any], Any] | None = None,
    scaler: Any = None,
    buckets: Sequence[Bucket] = (),
    progress: Callable[[PlanProgress], None] | None = None,
) -> TorchStep:
    """See `shardwright.torch.parallelize`."""
    require_one_rank()
    require_session(session)
    require_plain(unwrap(model))
    if scaler is not None:
        require_scaler(scaler)
    is_sequence = isinstance(optimizer, list | tuple)
    optimizers = list(optimizer) if is_sequence else [] if optimizer is None else [optimizer]
    for member in optimizers:
        require_optimizer(member)
    require_apart(optimizers)
    if not callable(function):
        raise OptionError(
            f"the loss function is a {type(function).__name__}",
            where="loss_fn",
            remedy="pass a function of the model and the batch: lambda model, x, y: F.cross_entropy(model(x), y)",
        )
    whole = _takes_optimizer(function) if is_whole is None else is_whole
    if whole and not optimizers:
        raise OptionError(
            "a whole step needs an optimizer", where="optimizer", remedy="pass the optimizer that it takes"
        )
    return TorchStep(
        session, model, optimizers, function, is_whole=whole, is_sequence=is_sequence, options=options,
        builder=builder, init=init, scaler=scaler, buckets=buckets, progress=progress,
    )  # fmt: skip


def _require_gradients(name: str) -> None:
    """Raises ArgumentError where gradients are switched off around a call that computes them."""
    if not torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} trains, and gradients are switched off around the call",
            where=name,
            remedy="call it outside of torch.no_grad(), inference_mode() and set_grad_enabled(False); or step.evaluate",
        )


def require_session(session: Any) -> None:
    """Raises OptionError on what `connect` has not made."""
    from shardwright.client.session import Session

    if not isinstance(session, Session):
        raise OptionError(
            f"session is a {type(session).__name__}",
            where="session",
            remedy="pass it first: parallelize(sw.connect(), model, optimizer, loss_fn)",
        )


def _takes_optimizer(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return len(parameters) > 1 and parameters[1] in _SECOND_PARAMETER


def _number_type(number: float) -> TensorType:
    return TensorType((), torch.int64 if type(number) is int else torch.float64)


def _number(number: float) -> Any:
    return np.int64(number) if type(number) is int else np.float64(number)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | torch.SymFloat | torch.SymInt)


def _as_output(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    return torch.scalar_tensor(leaf, dtype=torch.float64 if isinstance(leaf, torch.SymFloat) else torch.int64)


def _loss_of(result: Any, name: str) -> Any:
    """The loss of what a loss function returned: itself, the first of a tuple, or its `loss`."""
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif isinstance(result, list | tuple) and result:
        loss = result[0]
    elif not isinstance(result, torch.Tensor):
        loss = getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ArgumentError(
            f"the loss is {shape}",
            where=name,
            remedy="return a scalar tensor, a tuple that begins with one, or something with a `loss`",
        )
    return loss


@contextlib.contextmanager
def _evaluating(modules: Sequence[Any]) -> Iterator[None]:
    flags = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
