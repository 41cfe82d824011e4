"""`step.init`: an initializer that runs on the servers, sharded as its step wants.

Its layouts are known only once the step is planned, so it runs at the first
call of the step with its results; or, planned on its own, when the user reads
one before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.jax import JaxFunction, Signature, spec_of
from shardwright.client.placement import place, settled
from shardwright.config import PlanOptions
from shardwright.layouts import Layout
from shardwright.plans import Mesh

if TYPE_CHECKING:
    from shardwright.client.session import Session


class PendingInit:
    """An initializer that was called but has yet to run; its handles wait for it."""

    def __init__(self, session: Session, init_fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._session = session
        self._lock = threading.RLock()
        function = JaxFunction(init_fn)
        self._leaves, tree = jax.tree.flatten((args, {}))
        specs = tuple(leaf.spec if type(leaf) is RemoteArray else spec_of(leaf) for leaf in self._leaves)
        self._lowered = function.lower(Signature((), tree, specs), platform=session.info.platform)
        self._handles: list[weakref.ref[RemoteArray]] = []
        self._has_run = False

    def handles(self) -> Any:
        """The pytree that the initializer returns, as handles."""
        handles = [RemoteArray(self._session, spec, pending=self) for spec in self._lowered.results]
        self._handles = [weakref.ref(handle) for handle in handles]
        return jax.tree.unflatten(self._lowered.result_tree, handles)

    def materialize(self, mesh: Mesh | None = None, wanted: Mapping[int, Layout] | None = None) -> None:
        """Runs it; `wanted` are layouts by `id()` of a handle, on `mesh`."""
        with self._lock:
            if self._has_run:
                return
            handles = [reference() for reference in self._handles]
            outputs = {
                number: wanted[id(handle)]
                for number, handle in enumerate(handles)
                if handle is not None and wanted is not None and id(handle) in wanted
            }
            program = self._session.prepare(
                self._lowered,
                settled(
                    PlanOptions(
                        mesh=mesh.sizes if mesh is not None else None,
                        argument_names=self._lowered.argument_names,
                        output_names=self._lowered.output_names,
                    ),
                    {},
                    outputs,
                ),
            )
            leaves = place(self._session, self._leaves, program)
            results = self._session.run(program, leaves, [handle is not None for handle in handles])
            self._has_run = True
            self._leaves = []
            for handle, result in zip(handles, results, strict=True):
                if handle is not None and result is not None:
                    handle._adopt(result)
