"""The state of a step on the servers: that of its module, its optimizers and its gradient scaler, and what is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.counters import write_numbers
from shardwright.client.frontends.torch.dtypes import to_numpy
from shardwright.client.frontends.torch.following import bring_in_all
from shardwright.client.frontends.torch.held_state import hold_back, take_changes
from shardwright.client.frontends.torch.initialization import initialize
from shardwright.client.frontends.torch.scaling import ScalerState, assign_scaler, host_scaler
from shardwright.client.frontends.torch.state import (
    RANDOM,
    ModelState,
    OptimizerState,
    StateGroup,
    fetch,
    gradient_name,
    host_values,
    send,
    share_state,
    upload,
    use_seed,
)
from shardwright.client.frontends.torch.tracing import TensorType
from shardwright.errors import ArgumentError

if TYPE_CHECKING:
    import os

    from shardwright.client.checkpoints import Save
    from shardwright.client.session_state import SessionState


class TrainingState:
    """Groups of named arrays, shared with other steps of the same module or optimizers in the session."""

    def __init__(
        self, session: SessionState, model: Any, optimizers: Sequence[Any], scaler: Any, *, is_sequence: bool,
        init: Callable[[Any], Any] | None,
    ) -> None:  # fmt: skip
        self._session, self._module, self._scaler, self._init = session, model, scaler, init
        self._optimizers, self._is_sequence = list(optimizers), is_sequence
        self.model: ModelState = share_state(model, session, lambda: ModelState(model))
        self.optimizers: list[OptimizerState] = [
            share_state(
                optimizer,
                session,
                partial(OptimizerState, f"optimizer[{n}]" if is_sequence else "optimizer", optimizer),
            )
            for n, optimizer in enumerate(self._optimizers)
        ]
        self.scaler: ScalerState | None = None
        if scaler is not None:
            self.scaler = share_state(scaler, session, lambda: ScalerState(scaler))

    @property
    def layout(self) -> tuple[Any, ...]:
        """Which tensors the module's paths have, and the optimizers' groups."""
        return self.model.layout, *(group.members for group in self.optimizers)

    def require(self, *, takes_types: bool = False, takes_gradients: bool = False) -> None:
        """Names and types of the state as the user has left it; handles as well, unless types will do.

        takes_gradients: the step begins with the gradients that there are.
        """
        self._session.cluster.require_open()
        state, steps = self.model, self._session.steps
        written = state.take_changes()
        of_optimizers = [
            take_changes(optimizer, group, self._module, state)
            for optimizer, group in zip(self._optimizers, self.optimizers, strict=True)
        ]
        if takes_types:
            for group, names in zip((state, *self.optimizers), (written, *of_optimizers), strict=True):
                for name in names:
                    group.mirror.mark_written(name)
            return
        if state.take_seed():
            upload(steps, state, {RANDOM: _key_of(state.seed)})
        written += [name for name in state.names if name not in state.values]
        if any(state.tensors[name].is_meta for name in written) and len(written) >= len(state.names):
            initialize(steps, self._module, state, self._init)
            state.mirror.advance(state.names)
            written = []
        bring_in_all(state.tensors[name] for name in written if name not in state.values)
        send(steps, state.mirror, {name: state.tensors[name] for name in written})
        for group, names in zip(self.optimizers, of_optimizers, strict=True):
            send(steps, group.mirror, {name: group.mirror.tensors[name] for name in names})
        for group in (*self.optimizers, *([self.scaler] if self.scaler else [])):
            if group.start:
                upload(steps, group, group.start)
                group.start = {}
        if takes_gradients:
            self._send_gradients()

    def _send_gradients(self) -> None:
        group = self.model.gradients
        written = {gradient_name(n): tensor for n, tensor in self.model.mirror.list_written_gradients().items()}
        for name in written:
            group.types.pop(name, None)
            group.values.pop(name, None)
        present = {name: gradient for name, gradient in written.items() if gradient is not None}
        group.types |= {name: TensorType(tuple(g.shape), g.dtype) for name, g in present.items()}
        upload(self._session.steps, group, host_values(present))

    def sync(self) -> None:
        """Writes the servers' values into what is here: the module's parameters and buffers, the optimizers' state, and
        the scale of a gradient scaler.
        """
        self.require()
        self.model.mirror.bring_in()
        for optimizer, group in zip(self._optimizers, self.optimizers, strict=True):
            hold_back(optimizer, group, self.model)
            group.bring_in()
        if self.scaler is not None:
            assign_scaler(self._scaler, fetch(self.scaler.values))

    def take(self, handles: Mapping[int, dict[str, RemoteArray]], groups: Sequence[StateGroup]) -> None:
        """The arrays that a step has made, by the group's number and their name."""
        for number, of_group in handles.items():
            groups[number].advance(of_group)
        for optimizer, group in zip(self._optimizers, self.optimizers, strict=True):
            hold_back(optimizer, group, self.model)

    def write_numbers(self) -> None:
        """What the optimizers here show of the numbers that steps count."""
        for optimizer, group in zip(self._optimizers, self.optimizers, strict=True):
            if group.numbers:
                write_numbers(optimizer, group, self.model.tensors)
                hold_back(optimizer, group, self.model)

    def keep_gradients(
        self, types: Mapping[str, TensorType], arrays: Iterable[RemoteArray], lost: Sequence[str]
    ) -> None:
        """The gradients that a step leaves: those that it updated, and new ones. lost: those that eager has besides."""
        group, news = self.model.gradients, iter(arrays)
        for name in [name for name in group.names if name not in types]:
            del group.types[name]
            group.values.pop(name)
        for name, kind in types.items():
            if name not in group.types:
                group.types[name] = kind
                group.values[name] = next(news)
        names = {gradient_name(name): name for name in self.model.names}
        left = {names[name]: handle for name, handle in group.values.items()}
        self.model.mirror.leave_gradients(left, [names[name] for name in lost])

    def state_dict(self) -> dict[str, Any]:
        """See `TorchStep.state_dict`."""
        self.sync()
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        random = fetch({RANDOM: self.model.values[RANDOM]})[RANDOM]
        state = {"model": _copy(self._module.state_dict()), "random": random}
        if optimizers:
            state["optimizer"] = _copy(optimizers if self._is_sequence else optimizers[0])
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """See `TorchStep.load_state_dict`."""
        parts = ("model", "optimizer", "scaler", "random")
        if not state or any(key not in parts for key in state):
            raise ArgumentError(
                f"the state has the keys {sorted(map(str, state))[:5]}",
                where="state",
                remedy='pass {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, or a part of it',
            )
        self.sync()
        if "model" in state:
            self._module.load_state_dict(state["model"], strict=strict)
        if "optimizer" in state:
            states = state["optimizer"] if self._is_sequence else [state["optimizer"]]
            for optimizer, optimizer_state, group in zip(self._optimizers, states, self.optimizers, strict=True):
                optimizer.load_state_dict(optimizer_state)
                _require_entries(optimizer, group, self.model.tensors)
        if "scaler" in state and self.scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
            upload(self._session.steps, self.scaler, host_scaler(self._scaler))
        self.require()
        if "random" in state:
            use_seed()
            upload(self._session.steps, self.model, {RANDOM: to_numpy(state["random"])})

    def save(self, directory: str | os.PathLike[str], *, step: int | None, max_to_keep: int | None) -> Save:
        """See `TorchStep.save`."""
        self.require()
        return self._session.saves.save(self._handles(), directory, step=step, max_to_keep=max_to_keep)

    def restore(self, directory: str | os.PathLike[str], *, step: int | None) -> None:
        """See `TorchStep.restore`."""
        self.require()
        use_seed()
        restored = self._session.saves.restore(directory, step=step, like=self._handles())
        for group, part in zip(self._groups(), restored, strict=True):
            group.advance({name: part[_checkpoint_name(name)] for name in group.values})
        for optimizer, group in zip(self._optimizers, self.optimizers, strict=True):
            hold_back(optimizer, group, self.model)

    def _groups(self) -> list[StateGroup]:
        return [self.model, *self.optimizers, *([self.scaler] if self.scaler else [])]

    def _handles(self) -> list[dict[str, RemoteArray]]:
        return [{_checkpoint_name(n): handle for n, handle in g.values.items()} for g in self._groups()]


def _key_of(seed: int) -> np.ndarray:
    """The words of JAX's threefry key of a seed."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def _copy(tree: Any) -> Any:
    return _pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _require_entries(optimizer: Any, group: OptimizerState, tensors: Mapping[str, Any]) -> None:
    """Raises ArgumentError where a loaded optimizer has less than the step keeps."""
    for parameter, key in group.entries.values():
        if key not in optimizer.state.get(tensors[parameter], {}):
            raise ArgumentError(f"the optimizer's state has no {key!r} of {parameter}", where="state['optimizer']")


def _checkpoint_name(name: str) -> str:
    """Checkpoints part names at dots."""
    return name.replace(".", "/")
