"""Numbers that an optimizer keeps of each parameter, such as a count of steps: arguments, one for those alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.client.frontends.torch.places import Place
from shardwright.client.frontends.torch.reads import Write
from shardwright.client.frontends.torch.state import OptimizerState
from shardwright.errors import UnsupportedProgramError


def is_number(value: Any) -> bool:
    """An int or a float, and no flag."""
    return type(value) in (int, float)


class FirstValues(dict):  # type: ignore[type-arg]
    """Entries of one parameter, with what each was set to first."""

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        super().__init__(entries or {})
        self.first = dict(self)

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *entries: Any, **named: Any) -> None:
        for key, value in dict(*entries, **named).items():
            self[key] = value


class FirstStates(defaultdict):  # type: ignore[type-arg]
    """An empty `optimizer.state` that sees how its entries begin."""

    def __init__(self) -> None:
        super().__init__(FirstValues)

    def __setitem__(self, parameter: Any, entries: Any) -> None:
        super().__setitem__(parameter, entries if isinstance(entries, FirstValues) else FirstValues(entries))


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that several parameters' entries have alike. optimizer: its number. members: (parameter's name, key)."""

    optimizer: int
    key: str
    value: float
    members: tuple[tuple[str, str], ...]


def list_counters(groups: Sequence[OptimizerState]) -> list[Counter]:
    """Those of some optimizers now."""
    counters = []
    for number, group in enumerate(groups):
        members: dict[tuple[str, type, float], list[tuple[str, str]]] = {}
        for (parameter, key), value in group.numbers.items():
            members.setdefault((key, type(value), value), []).append((parameter, key))
        counters += [Counter(number, key, value, tuple(names)) for (key, _, value), names in members.items()]
    return counters


def name_counters(counters: Sequence[Counter], groups: Sequence[OptimizerState]) -> list[str]:
    """How arguments are called: `optimizer.step`, or `optimizer.step[1]` of several."""
    names: list[str] = []
    for counter in counters:
        name = f"{groups[counter.optimizer].prefix}.{counter.key}"
        count = sum(other == name or other.startswith(f"{name}[") for other in names)
        names.append(f"{name}[{count}]" if count else name)
    return names


def take_numbers(optimizer: Any, group: OptimizerState, tensors: Mapping[str, Any]) -> None:
    """What the user has changed in numbers that are here."""
    for parameter, key in group.numbers:
        value: Any = (dict.get(optimizer.state, tensors[parameter]) or {}).get(key)
        if is_number(value):
            group.numbers[parameter, key] = value


def write_numbers(optimizer: Any, group: OptimizerState, tensors: Mapping[str, Any]) -> None:
    """The numbers as they are after a step, where the optimizer has entries of their parameters here."""
    for (parameter, key), value in group.numbers.items():
        entries = dict.get(optimizer.state, tensors[parameter])
        if entries is not None:
            entries[key] = value


def list_number_writes(optimizer: Any, group: OptimizerState, owners: Mapping[str, Any]) -> list[Write]:
    """What a traced step leaves in the numbers. owners: by name, the parameters of the trace.

    Raises UnsupportedProgramError where it makes tensors that its first step did not make.
    """
    writes = []
    tensors = set(group.entries.values())
    for parameter, owner in owners.items():
        for key, value in dict.get(optimizer.state, owner, {}).items():
            place = Place(group.numbers, (parameter, key), f"{group.prefix}.{key}")
            if isinstance(value, torch.SymInt | torch.SymFloat):
                writes.append(Write(place, value, value.node.expr))
            elif is_number(value):
                writes.append(Write(place, value))
            elif isinstance(value, torch.Tensor) and (parameter, key) not in tensors:
                raise UnsupportedProgramError(
                    f"{type(optimizer).__name__} makes {key!r} of {parameter} after its first step",
                    remedy="make it in the first step, of zeros or another constant",
                )
    return writes
