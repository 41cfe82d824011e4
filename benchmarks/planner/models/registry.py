"""Every model of the benchmark, with the experts that fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.planner.cases import Case
from benchmarks.planner.experts.plans import experts
from benchmarks.planner.experts.rules import Expert
from benchmarks.planner.models import gpt2


@dataclass(frozen=True, kw_only=True)
class Model:
    """build(size, devices, **changes) makes a case; the rest says which experts make sense."""

    build: Callable[..., Case]
    tensor: bool = True
    sequence: bool = False
    mixture: int = 0
    fused: bool = False

    def experts(self, devices: int) -> dict[str, Expert]:
        return experts(devices, tensor=self.tensor, sequence=self.sequence, mixture=self.mixture, fused=self.fused)


MODELS = {
    "gpt2": Model(build=gpt2.build, sequence=True, fused=True),
}
