"""A step of TensorFlow on the servers, and what its user does with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from shardwright.builders.base import Builder
from shardwright.client.array_specs import array_spec
from shardwright.client.frontends.names import unique_names
from shardwright.client.frontends.planned_step import PlannedStep
from shardwright.client.frontends.program import Program
from shardwright.client.frontends.sessions import require_session
from shardwright.client.frontends.tensorflow.function import TensorFlowFunction
from shardwright.client.frontends.tensorflow.remote import RemoteTensor
from shardwright.client.frontends.tensorflow.tracing import Trace
from shardwright.client.frontends.tensorflow.variables import VariableStore, store_of
from shardwright.client.step import Step
from shardwright.errors import OptionError, PlanError
from shardwright.options.plan_options import PlanOptions

if TYPE_CHECKING:
    from shardwright.client.checkpoints import Save
    from shardwright.client.session import Session
    from shardwright.client.session_state import SessionState
    from shardwright.progress import PlanProgress
    from shardwright.user_plans import PipelinePlan, Plan


class TensorFlowStep(PlannedStep):
    """A function of TensorFlow that runs on the servers; made by `parallelize`.

    The first call traces, plans, compiles and loads a program; later calls of the same types run it. The variables that
    the function uses live on the servers. Those here keep their old values until `sync`; what is assigned to one of
    them is sent with the next step.
    """

    def __init__(
        self,
        session: SessionState,
        function: TensorFlowFunction,
        options: PlanOptions,
        builder: Builder | None,
        progress: Callable[[PlanProgress], None] | None,
    ) -> None:
        self.name = function.name
        self._session = session
        self._front_end = function
        self._step = Step(session, self._front_end, options, progress, builder)
        self._store: VariableStore = store_of(session.steps)

    # ---- calls -----------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; returns what the function returns, with a RemoteTensor in place of each tensor.

        Does not wait for the result. Tensors, numpy arrays and earlier results are arguments of the program; Python
        numbers, text and flags are part of it, and another value makes another program, as in `tf.function`.

        Raises ArgumentError on what is no argument, UnsupportedProgramError on a function that XLA does not compile.
        """
        call = self._front_end.read_call(args, kwargs)
        trace = self._front_end.trace(call)
        result = self._step(call, self._store.take(trace.variables))
        values, updates = trace.unpack(jax.tree.leaves(result))
        self._store.put(trace.updated, updates)
        return trace.pack([RemoteTensor(value) for value in values])

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """The HLO text of the call, with names of arguments; nothing is sent or run. Takes `tf.TensorSpec`s, too."""
        return self._front_end.trace(self._front_end.read_call(args, kwargs)).program

    def compile(self, *args: Any, **kwargs: Any) -> Plan | PipelinePlan:
        """Plans, compiles and loads the program of a call without running it. Takes `tf.TensorSpec`s, too."""
        call = self._front_end.read_call(args, kwargs)
        return self._step.compile(call, self._store.take(self._front_end.trace(call).variables))

    @property
    def traces(self) -> Sequence[Trace]:
        """The function for the types that it was called with so far."""
        return self._front_end.traces

    def cancel(self) -> int:
        """Ends the unfinished calls; see `Step.cancel`."""
        return self._step.cancel()

    # ---- variables -------------------------------------------------------------------------

    @property
    def variables(self) -> dict[str, Any]:
        """Name → variable, of all programs so far."""
        return dict(self._list_variables())

    def sync(self) -> None:
        """Assigns the servers' values to the variables here. Raises a step's error if it failed."""
        self._store.bring(self.variables.values())

    def save(
        self, directory: str | os.PathLike[str], *, step: int | None = None, max_to_keep: int | None = None
    ) -> Save:
        """Writes the variables to a checkpoint on the servers' file system; see `Session.save`."""
        variables = self._require_variables()
        state = dict(zip(variables, self._store.take(list(variables.values())), strict=True))
        return self._session.saves.save(state, directory, step=step, max_to_keep=max_to_keep)

    def restore(self, directory: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Takes the variables' values from a checkpoint of `save`; see `Session.restore`.

        Raises PlanError before the first call or `compile`: the step's variables are not known yet.
        """
        variables = self._require_variables()
        types = {name: array_spec(tuple(v.shape), v.dtype.as_numpy_dtype).aval for name, v in variables.items()}
        restored = self._session.saves.restore(directory, step=step, like=types)
        self._store.put(list(variables.values()), [restored[name] for name in variables])

    def _list_variables(self) -> list[tuple[str, Any]]:
        named: dict[int, tuple[str, Any]] = {}
        for trace in self.traces:
            for name, variable in zip(trace.names, trace.variables, strict=True):
                named.setdefault(id(variable), (name, variable))
        names = unique_names([name for name, _ in named.values()])
        return list(zip(names, (variable for _, variable in named.values()), strict=True))

    def _require_variables(self) -> dict[str, Any]:
        if not self.traces:
            raise PlanError(
                f"the variables of {self.name} are not known before its first call",
                remedy="call it, or step.compile(*batch), first",
            )
        return self.variables


def parallelize(
    session: Session,
    function: Any,
    *,
    options: PlanOptions,
    builder: Builder | None,
    progress: Callable[[PlanProgress], None] | None,
) -> TensorFlowStep:
    """See `shardwright.tensorflow.parallelize`."""
    require_session(session)
    if not callable(function):
        raise OptionError(
            f"the step is a {type(function).__name__}",
            where="function",
            remedy="pass a function or tf.function of the batch: lambda x, y: model.train_step((x, y))",
        )
    inner = getattr(function, "python_function", function)
    name = getattr(inner, "__name__", "step")
    front_end = TensorFlowFunction(function, name if name.isidentifier() else "step")
    return TensorFlowStep(session._state, front_end, options, builder, progress)
