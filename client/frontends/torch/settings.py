"""Settings of an optimizer's groups: those that change are arguments of a program, which holds the others by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: What schedulers write into a group for themselves.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


@dataclass(frozen=True, slots=True)
class Setting:
    """A number in a group of an optimizer, both by number. position: in a tuple; None: it stands alone."""

    optimizer: int
    group: int
    key: str
    position: int | None = None

    def read(self, optimizers: Sequence[Any]) -> Any:
        value = optimizers[self.optimizer].param_groups[self.group][self.key]
        return value if self.position is None else value[self.position]

    def write(self, group: dict[str, Any], value: Any) -> None:
        """Set it in its group."""
        if self.position is None:
            group[self.key] = value
        else:
            values = group[self.key]
            group[self.key] = (*values[: self.position], value, *values[self.position + 1 :])

    @property
    def name(self) -> str:
        """`lr`, `betas.0`."""
        return self.key if self.position is None else f"{self.key}.{self.position}"


class Settings:
    """The settings of some optimizers. Learning rates change; of others it is seen, or a scheduler says so."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._changing = {"lr"}
        self._before: dict[Setting, Any] = {}

    def read(self) -> tuple[dict[Setting, float], tuple[Any, ...]]:
        """(those that change, all others by setting), as they are now."""
        now = self._list()
        self._changing |= {
            setting.name
            for setting, value in now.items()
            if type(value) is float and type(self._before.get(setting)) is float and value != self._before[setting]
        }
        self._before = now
        changing = {
            setting: value if type(value) is int and setting.name != "lr" else float(value)
            for setting, value in now.items()
            if (setting.name == "lr" and value is not None)
            or (setting.name in self._changing and type(value) in (int, float))
        }
        return changing, tuple((setting, _constant(value)) for setting, value in now.items() if setting not in changing)

    def make_changing(self, name: str) -> None:
        """From now on a number of the groups is an argument: the step itself changes it."""
        self._changing.add(name)

    def names(self, settings: Sequence[Setting], *, is_sequence: bool) -> list[str]:
        """How arguments are called: `optimizer.lr`; of several groups `optimizer.lr[1]`."""
        names = []
        for setting in settings:
            owner = f"optimizer[{setting.optimizer}]" if is_sequence else "optimizer"
            is_single = len(self._optimizers[setting.optimizer].param_groups) == 1
            names.append(f"{owner}.{setting.name}" + ("" if is_single else f"[{setting.group}]"))
        return names

    def _list(self) -> dict[Setting, Any]:
        values: dict[Setting, Any] = {}
        for number, optimizer in enumerate(self._optimizers):
            for count, group in enumerate(optimizer.param_groups):
                if "max_momentum" in group:  # it is cycled from the first step on
                    self._changing.add("momentum" if "momentum" in group else "betas.0")
                for key, value in group.items():
                    if key == "params" or key in _OF_SCHEDULERS:
                        continue
                    if isinstance(value, tuple):
                        values |= {Setting(number, count, key, at): item for at, item in enumerate(value)}
                    else:
                        values[Setting(number, count, key)] = value
        return values


def _constant(value: Any) -> Any:
    return value if isinstance(value, float | int | bool | str | None) else repr(value)
