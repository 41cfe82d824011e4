"""The interface of strategy builders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.plans.variable_strategy import VariableStrategy


class Builder:
    """Gives every variable of a step its strategy. Derive from it, define `build`, and pass it as `force=`.

    bucket: maximum bytes of a combined collective, like the option `bucket`; None: the compiler's default.
    """

    bucket: int | str | None = None

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        """Variable name → strategy; variables left out are all-reduced.

        variables: in the order of the step's arguments. cluster: nodes and their device counts; a session's has neither
        links nor hardware.
        """
        raise NotImplementedError(f"{type(self).__name__}.build")

    def notes(self, strategies: Mapping[str, VariableStrategy]) -> Sequence[str]:
        """Lines about the strategies for the plan's notes; none by default."""
        return ()

    @property
    def name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        arguments = {name: value for name, value in vars(self).items() if isinstance(value, bool | int | float | str)}
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


class Synchronous(Builder):
    """A builder with AutoDist's arguments `sync` and `staleness`; gradients are always applied in their own step."""

    _ASYNCHRONOUS: ClassVar[str] = (
        "wrap the optimizer for gradients that are some steps old: "
        "shardwright.strategies.stale(optimizer, steps={steps}), which is what staleness= asks for"
    )

    def __init__(self, *, sync: bool = True, staleness: int = 0) -> None:
        if not sync:
            raise OptionError(
                "sync=False: workers that update at any time have no reproducible step, and no plan",
                where=f"{self.name}(sync=)",
                remedy=f"leave sync=True; for late gradients say staleness=: {self._ASYNCHRONOUS.format(steps=1)}",
            )
        if staleness:
            raise OptionError(
                f"staleness={staleness!r} is the optimizer's business, not a layout's",
                where=f"{self.name}(staleness=)",
                remedy=self._ASYNCHRONOUS.format(steps=staleness),
            )


def largest_even_dim(variable: Variable, devices: int) -> int | None:
    """The largest dimension divisible by the number of devices, the first of equal ones; None without any."""
    return max(variable.even_dims(devices), key=lambda dim: variable.shape[dim], default=None)


def first_even_dim(variable: Variable, devices: int) -> int | None:
    """The first dimension divisible by the number of devices; None without any."""
    return next(iter(variable.even_dims(devices)), None)
