"""`step.init`: an initializer that runs on the servers, sharded like the step's arguments.

Its layouts follow from the step's plan: it runs at the first call of the step with its results. A handle read earlier
makes it run planned on its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.client.arrays import RemoteArray
from shardwright.client.checks import checks_from_settings, raise_not_finite
from shardwright.client.frontends.jax import JaxFunction
from shardwright.client.frontends.program import Program
from shardwright.client.pins import pin_layouts
from shardwright.client.placement import Placement, RowParts
from shardwright.client.resharding import place
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.client.cluster_view import ClusterView
    from shardwright.client.step_queue import StepQueue


class PendingInit:
    """A called initializer before its run; its handles wait for it."""

    def __init__(self, steps: StepQueue, init_fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._steps = steps
        self._lock = threading.RLock()
        function = JaxFunction(init_fn)
        self._signature, self._leaves, _ = function.describe(args, {})
        self._function = init_fn
        self._is_x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        self._lowered = steps.cluster.lower(function, self._signature)
        self._handles: list[weakref.ref[RemoteArray]] = []
        self._has_run = False

    def handles(self) -> Any:
        """The initializer's result pytree, in handles."""
        handles = [
            RemoteArray(self._steps.arrays, spec, pending=self)
            for spec in self._lowered.results[: self._lowered.result_count]
        ]
        self._handles = [weakref.ref(handle) for handle in handles]
        return self._lowered.build_result(handles)

    def materialize(self, targets: Mapping[int, Placement | None]) -> None:
        """Runs it, one program for each mesh. targets: `id()` of a handle → placement."""
        with self._lock:
            if self._has_run:
                return
            handles = {n: handle for n, handle in enumerate(ref() for ref in self._handles) if handle is not None}
            places = {n: targets.get(id(handle)) for n, handle in handles.items()}
            parts: dict[int, dict[tuple[int, int] | None, RemoteArray]] = {}
            for number, part in enumerate(_group_by_mesh(places, self._steps.cluster)):
                results = self._run(part, has_debug=number == 0)
                for output, result in zip(part.outputs, results, strict=True):
                    parts.setdefault(output.number, {})[output.rows] = result
            self._has_run = True
            self._leaves = []
            for number, handle in handles.items():
                handle._adopt(_handle_of_parts(handle, places[number], parts[number]))

    def _run(self, part: _Part, *, has_debug: bool) -> list[RemoteArray]:
        """The outputs of one mesh, computed there. has_debug: whether it says what `jax.debug` says in the function."""
        steps, outputs = self._steps, part.outputs
        is_whole = [output.number for output in outputs] == list(range(self._lowered.result_count))
        lowered = self._lowered if is_whole and not part.has_rows else self._lower_outputs(outputs, has_debug=has_debug)
        options = PlanOptions(
            mesh=part.mesh.sizes if part.mesh is not None else None,
            argument_names=lowered.argument_names,
            output_names=lowered.output_names,
        )
        layouts = {n: output.layout for n, output in enumerate(outputs) if output.layout is not None}
        program = steps.programs.prepare_freely(lowered, pin_layouts(options, {}, layouts), devices=part.devices)
        checks = checks_from_settings()
        leaves = place(steps, lowered.with_captured(self._leaves), program)
        results = steps.run(program, leaves, checks=checks)
        if checks:
            raise_not_finite(lowered, results, results)
        return [result for result in results if result is not None]

    def _lower_outputs(self, outputs: Sequence[_Output], *, has_debug: bool) -> Program:
        """The initializer, cut down to some of its results, or rows of them: XLA computes nothing else."""

        def initialize(*args: Any) -> tuple[Any, ...]:
            leaves = jax.tree.leaves(self._function(*args))
            return tuple(_rows_of(leaves[output.number], output.rows) for output in outputs)

        with jax.enable_x64(self._is_x64):
            return self._steps.cluster.lower(JaxFunction(initialize, has_debug=has_debug), self._signature)


@dataclass(frozen=True, slots=True)
class _Output:
    """A result of the initializer, or rows of one, with its layout; None: the planner chooses."""

    number: int
    layout: Layout | None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Results that one program makes. mesh: None lets the planner choose; devices: None is the whole cluster."""

    mesh: Mesh | None
    devices: range | None
    outputs: list[_Output]

    @property
    def has_rows(self) -> bool:
        return any(output.rows is not None for output in self.outputs)


def _group_by_mesh(places: Mapping[int, Placement | None], cluster: ClusterView) -> list[_Part]:
    """The wanted results, grouped by mesh; those without a placement join another group."""
    parts: dict[tuple[Mesh, range] | None, _Part] = {}
    free = [number for number, wish in places.items() if wish is None]
    for number, wish in places.items():
        if wish is None:
            continue
        pieces = zip(wish.layouts, wish.bounds, strict=True) if isinstance(wish, RowParts) else [(wish, None)]
        for layout, rows in pieces:
            part = parts.setdefault(
                (layout.mesh, layout.devices), _Part(layout.mesh, cluster.part_of_cluster(layout), [])
            )
            part.outputs.append(_Output(number, layout, rows))
    if free:
        whole = next((part for part in parts.values() if part.devices is None), None)
        whole = whole or parts.setdefault(None, _Part(None, None, []))
        whole.outputs.extend(_Output(number, None) for number in free)
    for part in parts.values():
        part.outputs.sort(key=lambda output: (output.number, output.rows or (0, 0)))
    return list(parts.values())


def _rows_of(value: Any, rows: tuple[int, int] | None) -> Any:
    return value if rows is None else value[slice(*rows)]


def _handle_of_parts(
    handle: RemoteArray, wish: Placement | None, parts: Mapping[tuple[int, int] | None, RemoteArray]
) -> RemoteArray:
    """The new content of `handle`: one array, or the parts of one."""
    if not isinstance(wish, RowParts):
        return parts[None]
    ids: list[int] = []
    for bounds in wish.bounds:
        ids += parts[bounds]._ids
        parts[bounds]._ids = ()
    last = parts[wish.bounds[-1]]
    return RemoteArray(handle._store, handle.spec, ids=tuple(ids), place=wish, result=last._result)
