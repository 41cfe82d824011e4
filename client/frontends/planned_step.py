"""What steps of other frameworks tell of the step that they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.client.step import Step

if TYPE_CHECKING:
    from shardwright.user_plans import PipelinePlan, Plan


class PlannedStep:
    """A framework's step; it runs `_step`, one on arrays."""

    _step: Step

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan of the first program. Raises PlanError before the first call."""
        return self._step.plan

    @property
    def report(self) -> str:
        """The plan's expectation beside XLA's result: collectives, and memory of a device; see `Step.report`."""
        return self._step.report
