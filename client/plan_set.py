"""What a step runs under one choice of options: for each signature the programs that fit where arrays lie."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.builders.base import Builder
from shardwright.client.limits import PROGRAMS_OF_A_SIGNATURE
from shardwright.client.placement import Placement
from shardwright.client.programs import StepProgram
from shardwright.client.resharding import fits
from shardwright.options.plan_options import PlanOptions


@dataclass(slots=True, kw_only=True, eq=False)
class PlanSet:
    """Programs, planned under the same options.

    options, builder: how. programs: by signature, the newest last. main: the first one, whose plan is the step's; None:
    nothing is planned yet. main_signature: of the calls that run it.
    """

    options: PlanOptions
    builder: Builder | None
    programs: dict[Hashable, list[StepProgram]] = field(default_factory=dict)
    main: StepProgram | None = None
    main_signature: Hashable = None

    def find(self, signature: Hashable, leaves: Sequence[Any]) -> StepProgram | None:
        """One for arrays that lie as these leaves do."""
        return next((each for each in self.of(signature) if fits(leaves, each.leaf_places)), None)

    def of(self, signature: Hashable) -> list[StepProgram]:
        """Those of a signature; to be added to by `add` alone."""
        return self.programs.get(signature, [])

    def is_full(self, signature: Hashable) -> bool:
        return len(self.of(signature)) >= PROGRAMS_OF_A_SIGNATURE

    def add(self, signature: Hashable, program: StepProgram) -> None:
        self.programs.setdefault(signature, []).append(program)
        if self.main is None:
            self.main, self.main_signature = program, signature

    def keep_newest(self, signature: Hashable) -> None:
        """The others of a signature are for layouts that are gone."""
        del self.of(signature)[:-1]

    def with_main(self, program: StepProgram) -> PlanSet:
        """The same options with another program in the place of the main one, and without the rest."""
        return replace(self, programs={self.main_signature: [program]}, main=program)

    def without_programs(self) -> PlanSet:
        """For other nodes: a plan that was given is for as many devices as there were."""
        return PlanSet(
            options=replace(self.options, plan_json=""), builder=self.builder, main_signature=self.main_signature
        )

    def list_signatures(self) -> list[Hashable]:
        """Of calls that have programs, the main one's first."""
        signatures = [signature for signature, programs in self.programs.items() if programs]
        return sorted(signatures, key=lambda each: each != self.main_signature)

    def list_places(self) -> set[Placement]:
        """Where its programs have arrays."""
        programs = itertools.chain.from_iterable(self.programs.values())
        return {place for program in programs for place in (*program.arguments, *program.outputs) if place is not None}
