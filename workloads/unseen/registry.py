"""The unseen models by name, with what layouts by hand make sense for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workloads.cases import Case
from workloads.models.registry import Model
from workloads.unseen import llama, mixtures, preference, sparse, vision


def _sized(build: Callable[..., Case], sizes: Mapping[str, Mapping[str, Any]] | None = None) -> Callable[..., Case]:
    """`build(devices, **changes)` as `build(size, devices, **changes)`; sizes: what each one changes."""
    entries = {"base": {}} if sizes is None else sizes
    return lambda size, devices, **changes: build(devices, **{**entries[size], **changes})


_LLAMAS = {
    "lion": {"optimizer": "lion"},
    "adafactor": {"optimizer": "adafactor"},
    "accumulated": {"optimizer": "adamw", "parts": 4},
}

UNSEEN = {
    "mixtral": Model(build=_sized(mixtures.mixtral), sequence=True, mixture=8),
    "mamba": Model(build=_sized(mixtures.mamba)),
    "tied-llama": Model(build=_sized(llama.tied_llama, _LLAMAS), sequence=True),
    "lora": Model(build=_sized(llama.lora), sequence=True),
    "decode": Model(build=_sized(llama.decode)),
    "preference": Model(build=_sized(preference.preference), sequence=True),
    "dit": Model(build=_sized(vision.dit), sequence=True),
    "convnext": Model(build=_sized(vision.convnext)),
    "clip": Model(build=_sized(vision.clip), sequence=True),
    "gnn": Model(build=_sized(sparse.gnn)),
    "wide-deep": Model(build=_sized(sparse.wide_deep), tensor=False, tables=True),
}
