"""The options of `parallelize` and `plan`, checked and put into one `PlanOptions`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwright.config import FORCED_STRATEGIES, Pin, PlanOptions
from shardwright.errors import OptionError

#: Axis names of a mesh given by sizes only.
DEFAULT_AXES = ("data", "model")

Mesh = str | tuple[int, ...] | Mapping[str, int] | None
Force = str | Mapping[str, Mapping[int, Pin]] | None


def plan_options(*, mesh: Mesh = None, force: Force = None, **absent: Any) -> PlanOptions:
    """Checks what the user asked for.

    Args:
      mesh: "2x4", (2, 4) or {"data": 2, "model": 4}; one or two axes. None searches.
      force: one of `FORCED_STRATEGIES`, or argument name pattern → {dimension: pin}.
      absent: options that this version does not have; each must be None.

    Raises OptionError that names the option.
    """
    refuse_absent(absent)
    return PlanOptions(mesh=_mesh(mesh), force=_force(force))


def refuse_absent(options: Mapping[str, Any]) -> None:
    """Raises OptionError for each option of `options` that is not None."""
    for name, value in options.items():
        if value is not None:
            raise OptionError(
                f"option {name!r} is not supported by this version", where=name, remedy="leave it out, or pass None"
            )


def _mesh(mesh: Mesh) -> dict[str, int] | None:
    if mesh is None:
        return None
    if isinstance(mesh, str):
        if not re.fullmatch(r"\d+(x\d+)*", mesh):
            raise OptionError(f"{mesh!r} is no mesh", where="mesh", remedy='write sizes, such as "8" or "2x4"')
        mesh = tuple(int(size) for size in mesh.split("x"))
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(zip(DEFAULT_AXES, mesh, strict=False))
    if not 1 <= len(mesh) <= len(DEFAULT_AXES):
        raise OptionError(f"a mesh of {len(mesh)} axes", where="mesh", remedy="use one or two axes")
    for name, size in sizes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(f"mesh axis name {name!r} is not an identifier", where="mesh")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"mesh axis {name!r} has size {size!r}; sizes are integers from 1", where="mesh")
    return sizes


def _force(force: Force) -> str | dict[str, dict[int, Pin]] | None:
    if force is None:
        return None
    if isinstance(force, str):
        if force not in FORCED_STRATEGIES:
            raise OptionError(
                f"{force!r} is no strategy", where="force", remedy=f"one of {', '.join(FORCED_STRATEGIES)}"
            )
        return force
    if not isinstance(force, Mapping) or not all(isinstance(pins, Mapping) for pins in force.values()):
        raise OptionError(
            f"force is {force!r}", where="force", remedy='e.g. "data", or {"params[\'w\']": {0: "model", 1: None}}'
        )
    return {pattern: dict(pins) for pattern, pins in force.items()}


def name_matches(pattern: str, name: str) -> bool:
    """Whether a pattern of `force` names an argument: `*` and `?` are wildcards, brackets stand for themselves."""
    wanted = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return pattern == name or re.fullmatch(wanted, name) is not None
