"""`shardwright.torch.parallelize`: a training step of a module on the servers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch.utils import _pytree

from shardwright.builders.base import Builder
from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.planned_step import PlannedStep
from shardwright.client.frontends.torch.batch import TENSOR, Batch
from shardwright.client.frontends.torch.binding import BoundStep, leaves_gradients, record_events
from shardwright.client.frontends.torch.dtypes import to_numpy
from shardwright.client.frontends.torch.function import Call, TorchFunction
from shardwright.client.frontends.torch.initialization import initialize
from shardwright.client.frontends.torch.optimizers import (
    find_state,
    require_optimizer,
    without_decisions,
)
from shardwright.client.frontends.torch.remote import RemoteTensor
from shardwright.client.frontends.torch.scaling import (
    ScalerState,
    assign_scaler,
    host_scaler,
    require_scaler,
    scaler_settings,
)
from shardwright.client.frontends.torch.settings import Setting, Settings
from shardwright.client.frontends.torch.state import (
    RANDOM,
    ModelState,
    OptimizerState,
    StateGroup,
    fetch,
    host_values,
    require_plain,
    share_state,
    upload,
)
from shardwright.client.frontends.torch.tracing import Decisions, Graph, TensorType, trace
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
    buffers, the optimizer's state and the random key live on the servers; the module here keeps its old values until
    `sync`.
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
        progress: Callable[[PlanProgress], None] | None,
    ) -> None:
        self._session = session._state
        self._model = model
        self._optimizers = list(optimizers)
        self._function = function
        self._is_whole = is_whole
        self._is_sequence = is_sequence
        self._init = init
        self._scaler = scaler
        self._modules = list(model.modules())
        name = getattr(function, "__name__", "step")
        self.name = name if name.isidentifier() else "step"
        self._front_end = TorchFunction(self.name)
        self._step = Step(self._session, self._front_end, options, progress, builder)
        self._evaluation_end = TorchFunction(f"{self.name}_evaluation")
        reading = replace(options.without_trials(), plan_json="")  # where the state lies
        self._evaluation = Step(self._session, self._evaluation_end, reading, progress)
        self._settings = Settings(self._optimizers)
        self._keys: dict[Hashable, list[int]] = {}
        self._decisions: dict[int, Decisions] = {}
        self._trees: dict[Hashable, Any] = {}
        self._state: ModelState = share_state(model, self._session, lambda: ModelState(model))
        self._optimizer_states: list[OptimizerState] = [
            share_state(
                optimizer, self._session, partial(OptimizerState, f"optimizer[{n}]" if is_sequence else "optimizer")
            )
            for n, optimizer in enumerate(self._optimizers)
        ]
        self._scaler_state: ScalerState | None = None
        if scaler is not None:
            self._scaler_state = share_state(scaler, self._session, lambda: ScalerState(scaler))

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
        with _evaluating(self._modules):
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
        call, _ = self._call(batch, named, bool(self._optimizers))
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
        call, groups = self._call(batch, named, is_training)
        outcome = how(step, call) if how is not None else step(call)
        outputs, measured = outcome if isinstance(outcome, tuple) else (outcome, None)
        end = self._front_end if step is self._step else self._evaluation_end
        traced = end.traced[call.signature]
        places = [(group, name) for group in groups for name in group.names] + [(self._state, RANDOM)]
        numbers = [*traced.changed, *([call.state_count] if traced.draws else [])]
        for number, handle in zip(numbers, outputs, strict=False):
            group, name = places[number]
            group.values[name] = handle
        tree, leaves, gradient_types = self._trees[call.key]
        arrays = iter(outputs[len(numbers) :])
        if is_training:
            self._keep_gradients(gradient_types, arrays)
        filled = [RemoteTensor(next(arrays)) if leaf is TENSOR else leaf for leaf in leaves]
        result = _pytree.tree_unflatten(filled, tree)
        return (result, measured) if how is Step.measure else (measured, result)

    def _keep_gradients(self, gradient_types: Mapping[str, TensorType], arrays: Iterator[RemoteArray]) -> None:
        """The gradients that the step leaves: those that it updated, and new ones."""
        group = self._state.gradients
        for name in [name for name in group.names if name not in gradient_types]:
            del group.types[name]
            group.values.pop(name)
        for name, kind in gradient_types.items():
            if name not in group.types:
                group.types[name] = kind
                group.values[name] = next(arrays)

    def _call(self, batch: Any, named: Any, is_training: bool, *, takes_types: bool = False) -> tuple[Call, list[Any]]:
        """One call, and the owners of its state in order."""
        self._require_state(takes_types=takes_types)
        groups: list[StateGroup] = [self._state]
        if is_training:
            groups += self._optimizer_states
            groups += [self._scaler_state] if self._scaler_state is not None else []
            groups += [self._state.gradients] if self._is_whole else []
        arguments = Batch(self._function, batch, named, skip=1 + self._is_whole, takes_types=takes_types)
        settings, constants = self._settings.read() if is_training else ({}, ())
        setting_names = self._settings.names(list(settings), is_sequence=self._is_sequence)
        numbers = [*settings.values(), *arguments.numbers]
        names = [name for group in groups for name in group.names]
        types: list[TensorType | None] = [kind for group in groups for kind in group.types.values()]
        state_count = len(names)
        names += [RANDOM, *setting_names, *arguments.number_names, *arguments.tensor_names]
        types += [None, *[TensorType((), torch.float64)] * len(numbers), *arguments.types]
        leaves: list[Any] = [group.values.get(name) for group in groups for name in group.names]
        leaves += [self._state.values.get(RANDOM), *(np.float64(number) for number in numbers), *arguments.values]
        parameters = self._parameters()
        key = (
            is_training,
            tuple(module.training for module in self._modules),
            tuple(parameter.requires_grad for parameter in parameters),
            constants,
            scaler_settings(self._scaler) if is_training and self._scaler is not None else (),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            tuple(names) if self._is_whole else tuple(names[state_count:]),
            tuple(types),
            arguments.key,
        )
        number = self._number_of(key, numbers)
        make = partial(self._trace, number, groups, arguments, numbers, list(settings), is_training)
        return Call(number, leaves, tuple(names), tuple(types), state_count, make), groups

    def _number_of(self, key: Hashable, numbers: Sequence[float]) -> int:
        """Stands for the key, whose hash takes time, and for what the step decides by its numbers."""
        alike = self._keys.setdefault(key, [])
        for number in alike:
            if number not in self._decisions or self._decisions[number].hold(numbers):
                return number
        alike.append(sum(map(len, self._keys.values())))
        return alike[-1]

    def _parameters(self) -> list[Any]:
        return list(self._state.tensors.values())

    # ---- tracing -----------------------------------------------------------------------------

    def _trace(
        self, key: int, groups: Sequence[StateGroup], arguments: Batch, numbers: Sequence[float],
        settings: Sequence[Setting], is_training: bool,
    ) -> Graph:  # fmt: skip
        kinds = [kind for group in groups for kind in group.types.values()]
        count = len(kinds)

        def step(values: list[Any]) -> list[Any]:
            state, rest = values[:count], values[count:]
            changing, rest = dict(zip(settings, rest, strict=False)), rest[len(settings) :]
            args, kwargs = arguments.fill(rest)
            bound = BoundStep(
                self._model, self._state, self._optimizers, self._optimizer_states, state, changing,
                self._scaler if is_training else None,
            )  # fmt: skip
            if not is_training:
                bound.optimizers = []
            with (
                bound.swap_tensors(),
                torch.set_grad_enabled(is_training),
                record_events(self._model, self._optimizers) as events,
            ):
                result = self._body(args, kwargs, is_training)
                gradients = bound.gradients() if self._is_whole and leaves_gradients(events) else {}
                after = bound.read(gradients)
            leaves, tree = _pytree.tree_flatten(result)
            kinds = {name: TensorType(tuple(g.shape), g.dtype) for name, g in gradients.items()}
            self._trees[key] = tree, [TENSOR if _is_tensor(leaf) else leaf for leaf in leaves], kinds
            new_gradients = [gradient for name, gradient in gradients.items() if name not in bound.gradients_before]
            return [*after, *new_gradients, *(_as_output(leaf) for leaf in leaves if _is_tensor(leaf))]

        before = set(self._state.gradients.names)
        graph = trace(
            step, [*kinds, *numbers, *arguments.types], state_count=count, model=self._model,
            optimizers=self._optimizers, name=self.name,
        )  # fmt: skip
        self._decisions[key] = graph.decisions
        return replace(graph, new_state=tuple(name for name in self._trees[key][2] if name not in before))

    def _body(self, args: Sequence[Any], kwargs: Mapping[str, Any], is_training: bool) -> Any:
        if self._is_whole:
            optimizers = self._optimizers if self._is_sequence else self._optimizers[0]
            with without_decisions(self._optimizers):
                return self._function(self._model, optimizers, *args, **kwargs)
        if not is_training:
            return self._function(self._model, *args, **kwargs)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        result = self._function(self._model, *args, **kwargs)
        loss = _loss_of(result, self.name)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        with without_decisions(self._optimizers):
            for optimizer in self._optimizers:
                optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
        return result

    # ---- state -------------------------------------------------------------------------------

    def _require_state(self, *, takes_types: bool = False) -> None:
        """Names and types of the state; handles as well, unless types will do."""
        self._session.cluster.require_open()
        state = self._state
        for optimizer, of_optimizer in zip(self._optimizers, self._optimizer_states, strict=True):
            if not of_optimizer.entries:
                of_optimizer.start = find_state(optimizer, of_optimizer, self._model, state.tensors, state.types)
        if takes_types:
            return
        if RANDOM not in state.values:
            upload(self._session.steps, state, {RANDOM: _key_of(state.seed)})
        if any(name not in state.values for name in state.names):
            if any(tensor.is_meta for tensor in state.tensors.values()):
                initialize(self._session.steps, self._model, state, self._init)
            else:
                upload(self._session.steps, state, host_values(state.tensors))
        for group in (*self._optimizer_states, *([self._scaler_state] if self._scaler_state else [])):
            if group.start:
                upload(self._session.steps, group, group.start)
                group.start = {}

    def sync(self) -> None:
        """Writes the servers' values into what is here: the module's parameters and buffers, the optimizers' state, and
        the scale of a gradient scaler.
        """
        self._require_state()
        values = fetch({name: self._state.values[name] for name in self._state.names})
        with torch.no_grad():
            for name, tensor in self._state.tensors.items():
                _assign(tensor, values[name])
            for optimizer, state in zip(self._optimizers, self._optimizer_states, strict=True):
                for parameter, entries in self._optimizer_tensors(state).items():
                    optimizer.state[self._state.tensors[parameter]].update(entries)
        if self._scaler_state is not None:
            assign_scaler(self._scaler, fetch(self._scaler_state.values))

    def _optimizer_tensors(self, state: OptimizerState) -> dict[str, dict[str, Any]]:
        """Parameter's name → key → tensor, fetched."""
        values = fetch({name: state.values[name] for name in state.names})
        tensors: dict[str, dict[str, Any]] = {}
        for name, (parameter, key) in state.entries.items():
            tensors.setdefault(parameter, {})[key] = values[name]
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """The state, fetched, in PyTorch's format.

        `model`: for `model.load_state_dict`. `optimizer`: for `optimizer.load_state_dict`; a list of several. `scaler`:
        for `scaler.load_state_dict`. `random`: the key of random draws.
        """
        self.sync()
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        random = fetch({RANDOM: self._state.values[RANDOM]})[RANDOM]
        state = {"model": _copy(self._model.state_dict()), "random": random}
        if optimizers:
            state["optimizer"] = _copy(optimizers if self._is_sequence else optimizers[0])
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Replaces the state by that of `state_dict`, or by `{"model": …, "optimizer": …}` of plain PyTorch.

        What is not in it stays. The module and the optimizers here take the values as well.
        """
        parts = ("model", "optimizer", "scaler", "random")
        if not state or any(key not in parts for key in state):
            raise ArgumentError(
                f"the state has the keys {sorted(map(str, state))[:5]}",
                where="state",
                remedy='pass {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, or a part of it',
            )
        self.sync()
        if "model" in state:
            self._model.load_state_dict(state["model"], strict=strict)
        if "optimizer" in state:
            states = state["optimizer"] if self._is_sequence else [state["optimizer"]]
            for optimizer, optimizer_state, of_optimizer in zip(
                self._optimizers, states, self._optimizer_states, strict=True
            ):
                optimizer.load_state_dict(optimizer_state)
                of_optimizer.values.clear()
                of_optimizer.start = host_values(_entries(optimizer, of_optimizer, self._state.tensors))
        if "scaler" in state and self._scaler_state is not None:
            self._scaler.load_state_dict(state["scaler"])
            upload(self._session.steps, self._scaler_state, host_scaler(self._scaler))
        upload(self._session.steps, self._state, host_values(self._state.tensors))
        if "random" in state:
            upload(self._session.steps, self._state, {RANDOM: to_numpy(state["random"])})

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
            self.sync()
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
        self._require_state()
        return self._session.saves.save(self._handles(), directory, step=step, max_to_keep=max_to_keep)

    def restore(self, directory: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Takes the state from a checkpoint of `save`; see `Session.restore`."""
        self._require_state()
        restored = self._session.saves.restore(directory, step=step, like=self._handles())
        for group, part in zip(self._groups(), restored, strict=True):
            group.values.update({name: part[_checkpoint_name(name)] for name in group.values})

    def _groups(self) -> list[StateGroup]:
        return [self._state, *self._optimizer_states, *([self._scaler_state] if self._scaler_state else [])]

    def _handles(self) -> list[dict[str, RemoteArray]]:
        return [{_checkpoint_name(n): handle for n, handle in g.values.items()} for g in self._groups()]


def parallelize(
    session: Session,
    model: Any,
    optimizer: Any,
    function: Callable[..., Any],
    *,
    options: PlanOptions,
    builder: Builder | None = None,
    is_whole: bool | None = None,
    init: Callable[[Any], Any] | None = None,
    scaler: Any = None,
    progress: Callable[[PlanProgress], None] | None = None,
) -> TorchStep:
    """See `shardwright.torch.parallelize`."""
    require_plain(model)
    if scaler is not None:
        require_scaler(scaler)
    is_sequence = isinstance(optimizer, list | tuple)
    optimizers = list(optimizer) if is_sequence else [] if optimizer is None else [optimizer]
    for member in optimizers:
        require_optimizer(member)
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
        builder=builder, init=init, scaler=scaler, progress=progress,
    )  # fmt: skip


def _takes_optimizer(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return len(parameters) > 1 and parameters[1] in _SECOND_PARAMETER


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


def _key_of(seed: int) -> np.ndarray:
    """The words of JAX's threefry key of a seed."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def _assign(tensor: Any, value: Any) -> None:
    if tensor.is_meta:
        if isinstance(tensor, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, value)
    else:
        tensor.copy_(value)


def _copy(tree: Any) -> Any:
    return _pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _entries(optimizer: Any, state: OptimizerState, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of the optimizer by the state's names."""
    values = {}
    for name, (parameter, key) in state.entries.items():
        entries = optimizer.state.get(tensors[parameter], {})
        if key not in entries:
            raise ArgumentError(f"the optimizer's state has no {key!r} of {parameter}", where="state['optimizer']")
        values[name] = entries[key]
    return values


def _checkpoint_name(name: str) -> str:
    """Checkpoints part names at dots."""
    return name.replace(".", "/")
