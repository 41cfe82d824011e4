"""Tensors that a step reads beside its arguments, of closures, globals and other modules: state of the step as well."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.following import Mirror, as_they_are, bring_in_all, home_of
from shardwright.client.frontends.torch.state import StateGroup, send, type_of
from shardwright.errors import UnsupportedProgramError

if TYPE_CHECKING:
    from shardwright.client.frontends.torch.reads import Reads
    from shardwright.client.session_state import SessionState


class CapturedState(StateGroup):
    """Such tensors of one step, by name. Those that are another module's state in the session stay that."""

    def __init__(self, session: SessionState) -> None:
        super().__init__()
        self._session = session
        self.mirror.session = weakref.ref(session)
        session.readers.append(weakref.WeakMethod(self.bring_in))
        self.tensors: dict[str, Any] = {}
        self._owners: dict[str, tuple[Mirror, str]] = {}

    def add(self, tensors: Iterable[Any], names: Mapping[str, Any]) -> bool:
        """Takes those of some tensors that have a name; whether there are any."""
        by_id = {id(tensor): name for name, tensor in names.items()}
        news = {f"read.{by_id[id(tensor)]}": tensor for tensor in tensors if id(tensor) in by_id}
        self.tensors |= news
        return bool(news)

    @property
    def places(self) -> list[str]:
        """Names of the places where the tensors stand."""
        return [name.removeprefix("read.") for name in self.tensors]

    def after_step(self, values: Sequence[Any], reads: Reads, step: str) -> list[Any]:
        """What a traced step leaves in these places: the tensors of the trace for them, or others that it puts there.

        Raises UnsupportedProgramError where one is of another type than the tensor before it.
        """
        after = []
        for value, (name, tensor), now in zip(
            values, self.tensors.items(), reads.list_tensors_now(self.places), strict=True
        ):
            if now is tensor or not isinstance(now, torch.Tensor):
                after.append(value)
                continue
            if type_of(now) != type_of(tensor):
                raise UnsupportedProgramError(
                    f"{step} reads {name.removeprefix('read.')}, a tensor of {list(tensor.shape)} and {tensor.dtype}, "
                    f"and puts one of {list(now.shape)} and {now.dtype} there",
                    where=name.removeprefix("read."),
                    remedy="keep its shape and dtype from the first call on, or pass it to the step and return it",
                )
            after.append(now.detach())
        return after

    def require(self, names: Mapping[str, Any]) -> None:
        """Handles and types of the tensors as they are now. names: those that stand in the places of before."""
        for name in self.tensors:
            now = names.get(name.removeprefix("read."))
            if now is not None and now is not self.tensors[name]:
                self.mirror.drop(name)
                self.values.pop(name, None)
                self.tensors[name] = now
        written = self.mirror.list_written()
        for name, tensor in self.tensors.items():
            mirror, of_mirror = home_of(tensor) or (self.mirror, "")
            if mirror is not self.mirror and mirror.session is not None and mirror.session() is self._session:
                self._owners[name] = mirror, of_mirror
                continue
            self._owners.pop(name, None)
            if name not in self.values:
                bring_in_all([tensor])
                written.append(name)
        steps = self._session.steps
        send(steps, self.mirror, {name: self.tensors[name] for name in written})
        for mirror in {id(mirror): mirror for mirror, _ in self._owners.values()}.values():
            names_there = [n for owner, n in self._owners.values() if owner is mirror and n not in mirror.values]
            names_there += mirror.list_written()
            send(steps, mirror, {name: mirror.tensors[name] for name in names_there})
        self.values.update({name: mirror.values[n] for name, (mirror, n) in self._owners.items()})
        self.types = {name: type_of(tensor) for name, tensor in self.tensors.items()}

    def advance(self, handles: Mapping[str, RemoteArray]) -> None:
        """A step has made new arrays; of other modules' they are theirs."""
        super().advance({name: handle for name, handle in handles.items() if name not in self._owners})
        for name, (mirror, name_there) in self._owners.items():
            if name in handles:
                mirror.values[name_there] = handles[name]
                mirror.advance([name_there])

    def bring_in(self) -> None:
        """The servers' values in the tensors here."""
        self.mirror.bring_in()


def clear_traced_gradients(tensors: Iterable[Any]) -> None:
    """Tensors beside the step's own that a trace gave gradients: those are not kept."""
    with as_they_are():
        for tensor in tensors:
            if tensor.requires_grad and isinstance(tensor.grad, FakeTensor):
                tensor.grad = None
                home = home_of(tensor)
                if home is not None:
                    home[0].lost_gradients.add(home[1])


def versions_of(tensors: Iterable[Any]) -> list[tuple[Any, int]]:
    """Tensors with the number of their changes so far."""
    with as_they_are():
        return [(tensor, tensor._version) for tensor in tensors if not torch.is_inference(tensor)]
