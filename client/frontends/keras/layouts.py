"""Layouts of `keras.distribution` as pins by argument name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import keras

from shardwright.errors import OptionError
from shardwright.options.plan_options import Pins
from shardwright.options.user_options import name_matches

_Pin = TypeVar("_Pin")

_BATCH_PATTERNS = ("x", "x[*", "y", "y[*", "sample_weight", "sample_weight[*")


class Layouts:
    """A `LayoutMap`, `ModelParallel` or `DataParallel` of Keras.

    mesh: axis → size, or None. Raises OptionError on anything else.
    """

    def __init__(self, layouts: Any) -> None:
        self._map: Any = None
        self._batch_axis: str | None = None
        self.mesh: dict[str, int] | None = None
        if layouts is None:
            return
        distribution = keras.distribution
        if isinstance(layouts, distribution.LayoutMap):
            self._map = layouts
        elif isinstance(layouts, distribution.ModelParallel | distribution.DataParallel):
            self._map = getattr(layouts, "_layout_map", None)
            self._batch_axis = layouts.batch_dim_name
        else:
            raise OptionError(
                f"layouts is a {type(layouts).__name__}",
                where="layouts",
                remedy="pass a keras.distribution.LayoutMap, ModelParallel or DataParallel",
            )
        mesh = layouts.device_mesh
        if mesh is not None:
            self.mesh = dict(zip(mesh.axis_names, map(int, mesh.shape), strict=True))

    def pins(self, paths: Sequence[str], variables: Sequence[Any], trainable: Sequence[Any]) -> dict[str, Pins]:
        """Pins by argument name: of variables, of what optimizers keep of them, and of the batch.

        paths: unique name of each variable.
        """
        pins: dict[str, Pins] = {}
        if self._batch_axis is not None:
            pins.update({pattern: {0: self._batch_axis} for pattern in _BATCH_PATTERNS})
        if self._map is None:
            return pins
        for path, variable in zip(paths, variables, strict=True):
            layout = self._map[variable.path] or self._map[_reference_path(variable, trainable)]
            if layout is not None:
                pins[path] = _pins_of(layout, variable)
        return pins


def filter_pins(pins: Mapping[str, _Pin], names: Sequence[str]) -> dict[str, _Pin]:
    """Those of the pins that name an argument."""
    return {pattern: pin for pattern, pin in pins.items() if any(name_matches(pattern, name) for name in names)}


def require_no_distribution() -> None:
    """Raises OptionError while `keras.distribution.set_distribution` spreads variables over this process's devices."""
    active = keras.distribution.distribution()
    if active is not None:
        raise OptionError(
            f"keras.distribution.set_distribution({type(active).__name__}) places variables on devices of this process",
            where="keras.distribution",
            remedy="leave set_distribution out, and pass it: distribute(model, session, layouts=distribution)",
        )


def _reference_path(variable: Any, trainable: Sequence[Any]) -> str:
    """Path of the variable that an optimizer's is kept of (momentum of `a/kernel`: `sgd/a_kernel_momentum`); "" of
    others."""
    name = variable.path.rpartition("/")[2]
    references = [
        reference.path
        for reference in trainable
        if name.startswith(reference.path.replace("/", "_") + "_") and reference.shape == variable.shape
    ]
    return max(references, key=len, default="")


def _pins_of(layout: Any, variable: Any) -> Pins:
    axes = tuple(layout.axes)
    if len(axes) != len(variable.shape):
        raise OptionError(
            f"a layout of {len(axes)} axes, {axes}, for {variable.path} of shape {list(variable.shape)}",
            where="layouts",
            remedy="name an axis, or None, for each dimension",
        )
    return dict(enumerate(axes))
