"""Every model of the benchmark, with the experts that fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.planner.cases import Case
from benchmarks.planner.experts.plans import experts
from benchmarks.planner.experts.rules import Expert
from benchmarks.planner.models import bert, dlrm, gpt2, llama, lstm, moe, resnet, t5, unet, vit


@dataclass(frozen=True, kw_only=True)
class Model:
    """build(size, devices, **changes) makes a case; the rest says which experts make sense (see `experts`)."""

    build: Callable[..., Case]
    tensor: bool = True
    sequence: bool = False
    mixture: int = 0
    tables: bool = False
    fused: bool = False

    def experts(self, devices: int) -> dict[str, Expert]:
        return experts(
            devices,
            tensor=self.tensor,
            sequence=self.sequence,
            mixture=self.mixture,
            tables=self.tables,
            fused=self.fused,
        )


MODELS = {
    "gpt2": Model(build=gpt2.build, sequence=True, fused=True),
    "llama": Model(build=llama.build, sequence=True),
    "moe": Model(build=moe.build, sequence=True, mixture=64),
    "bert": Model(build=bert.build, sequence=True),
    "vit": Model(build=vit.build),
    "resnet": Model(build=resnet.build),
    "unet": Model(build=unet.build),
    "t5": Model(build=t5.build, sequence=True),
    "lstm": Model(build=lstm.build, fused=True),
    "dlrm": Model(build=dlrm.build, tensor=False, tables=True),
}
