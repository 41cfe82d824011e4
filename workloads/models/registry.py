"""The models by name, with what layouts by hand make sense for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workloads.cases import Case
from workloads.models import bert, dlrm, gpt2, llama, lstm, moe, resnet, t5, unet, vit


@dataclass(frozen=True, kw_only=True)
class Model:
    """build(size, devices, **changes) makes a case; the rest says which layouts by hand make sense.

    tensor: it has heads or wide layers to split. sequence: its residual stream has a sequence to split.
    mixture: the most experts of a mixture it has, or 0. tables: it has large embedding tables.
    fused: it takes `fused=False` for projections of q, k and v that Megatron can shard.
    """

    build: Callable[..., Case]
    tensor: bool = True
    sequence: bool = False
    mixture: int = 0
    tables: bool = False
    fused: bool = False


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
