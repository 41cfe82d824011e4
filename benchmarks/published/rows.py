"""The published runs of `rows.json` as values; and each as a model, a machine and the options that force its plan.

Fields are those of `rows.json`: shape of the model, machine, batch, degrees of parallelism, what was measured, source.
What a source does not print is None, and is not guessed, but for what `PublishedRow.assumed` says.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.published.steps import Model
from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.clusters.links import Link

ROWS = Path(__file__).with_name("rows.json")

#: Published name of a machine → hardware profile, and GB of one device where the profile's are others.
_MACHINES: dict[str, tuple[str, float | None]] = {
    "A100-40": ("a100", 40),
    "A100-80": ("a100", None),
    "B200": ("b200", None),
    "GB200": ("gb200", None),
    "GH200-96": ("h100", 96),
    "H100": ("h100", None),
    "H200": ("h200", None),
    "TPU-v5e": ("tpu-v5e", None),
    "TPU-v5p": ("tpu-v5p", None),
    "TPU-v6e": ("tpu-v6e", None),
    "V100": ("v100", None),
    "V100-16": ("v100", 16),
}

#: Devices of a node where a row does not say.
_DEVICES_PER_NODE = 8

_FAMILIES = ("gpt", "mpt", "opt", "llama", "moe", "vit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Degrees of parallelism; zero: ZeRO's stage; sp: sequence parallel beside tensor parallel; virtual: chunks of a
    stage."""

    dp: int | None = None
    fsdp: int | None = None
    zero: int | None = None
    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    virtual: int | None = None
    cp: int | None = None
    ep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured; memory_gib: of one device; oom: it ran out of memory."""

    step_s: float | None = None
    tokens_per_s_per_device: float | None = None
    tflops_per_device: float | None = None
    memory_gib: float | None = None
    oom: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published run: see the module's docstring."""

    id: str
    group: str
    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int | None
    seq: int
    hardware: str | None
    devices: int
    devices_per_node: int | None
    inter_node: str | None
    global_batch: int | None
    micro_batch: int | None
    accumulation: int | None
    dtype: str | None
    fused_attention: bool | None
    recompute: str | None
    sharding: Sharding
    measured: Measured
    experts: int = 0
    note: str | None = None
    source: str = ""
    step_s_is: str | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> PublishedRow:
        """From an object of `rows.json`; what is not a field is left out."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        return cls(**{**given, "sharding": Sharding(**values["sharding"]), "measured": Measured(**values["measured"])})

    # ---- the batch ----------------------------------------------------------------

    @property
    def stages(self) -> int:
        return self.sharding.pp or 1

    @property
    def replicas(self) -> int:
        """Parts of the batch."""
        return prod(degree or 1 for degree in (self.sharding.dp, self.sharding.fsdp))

    @property
    def sequences(self) -> int | None:
        """Sequences of a step: printed, or from the printed step and tokens a second."""
        known_s, rate = self.measured.step_s, self.measured.tokens_per_s_per_device
        if self.global_batch is None and known_s is not None and rate is not None:
            return round(rate * self.devices * known_s / self.seq)
        return self.global_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        if self.accumulation is not None:
            return self.accumulation
        assert self.sequences is not None, "why_not says so of such rows"
        if self.micro_batch is None and self.stages == 1 and self.sharding.zero == 3:
            return 1
        return max(1, self.sequences // self.replicas // (self.micro_batch or 1))

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the source does not print and the plan needs."""
        said = []
        if self.accumulation is None and self.micro_batch is None:
            said.append(f"{self.micro_batches} micro-batches")
        if self.dtype is None:
            said.append("bfloat16")
        if self.recompute is None:
            said.append("no recomputation")
        return tuple(said)

    @property
    def why_not(self) -> str:
        """What of the row cannot be written down; "": nothing."""
        if self.hardware is None:
            return "several kinds of GPU at once, not said on which node"
        if self.hardware not in _MACHINES:
            return f"no hardware profile of {self.hardware}"
        if self.family not in _FAMILIES:
            return f"no step of the family {self.family!r}"
        if self.sequences is None:
            return "the batch is not printed"
        if self.devices % self.stages:
            return f"{self.devices} devices are not {self.stages} equal stages"
        return ""

    # ---- model, machine, plan -------------------------------------------------------

    def model(self) -> Model:
        """The model and the batch of a step."""
        assert self.sequences is not None, "why_not says so of such rows"
        is_pure = "PURE" in (self.note or "")
        return Model(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            hidden=self.mlp,
            vocabulary=self.vocab or 0,
            positions=self.seq,
            batch=self.sequences,
            gated=self.family == "llama",
            patches=self.family == "vit",
            experts=self.experts,
            state="bfloat16" if is_pure else "float32",
            compute=self.dtype or "bf16",
            recompute=self.recompute or "none",
        )

    def cluster(self, memory_bytes: int | None = None) -> Cluster:
        """The machine; memory_bytes: of one device, instead of its own.

        Nodes are as large as can be without one that is smaller: of racks with 72 devices, 128 devices are two of 64.
        """
        assert self.hardware is not None
        hardware, memory_gb = _MACHINES[self.hardware]
        most = self.devices_per_node or _DEVICES_PER_NODE
        size = next(size for size in range(min(most, self.devices), 0, -1) if self.devices % size == 0)
        platform = "tpu" if hardware.startswith("tpu") else "cuda"
        ids = tuple(range(size)) if platform == "cuda" else ()
        nodes = tuple(
            ClusterNode(
                index=index,
                ip=f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}",
                port=1,
                device_count=size,
                gpu_ids=ids,
            )
            for index in range(self.devices // size)
        )
        return Cluster(
            name=self.hardware,
            nodes=nodes,
            platform=platform,
            hardware=hardware,
            memory_bytes_per_device=memory_bytes or (None if memory_gb is None else int(memory_gb * 1e9)),
            inter_node=_read_link(self.inter_node or "", size),
        )

    def options(self) -> dict[str, Any]:
        """What forces the row's own plan (`sw.plan`'s options)."""
        options: dict[str, Any] = {
            "mesh": self.mesh(),
            "force": "axes",
            "micro_batches": self.micro_batches,
            "remat": "none",
            "stages": self.stages,
        }
        if self.stages > 1:
            chunks = self.sharding.virtual or 1
            options["schedule"] = "1f1b" if chunks == 1 else f"interleaved-{chunks}"
        if self.fused_attention is False:
            options["fused_attention"] = "off"
        return options

    def mesh(self) -> dict[str, int]:
        """The axes of a stage by what they do (`force="axes"`), tensor parallelism innermost as Megatron has it."""
        cut = self.sharding
        state = {1: "zero1", 2: "zero2", 3: "fsdp"}
        axes = {
            "data" if not cut.zero or (cut.fsdp or 1) > 1 else state[cut.zero]: cut.dp,
            state[cut.zero or 3]: cut.fsdp,
            "expert": cut.ep,
            "context": cut.cp,
            "tensor" if cut.sp is False else "model": cut.tp,
        }
        return {name: degree for name, degree in axes.items() if degree and degree > 1} or {"data": 1}


def read_rows(path: Path = ROWS) -> list[PublishedRow]:
    return [PublishedRow.of(values) for values in json.loads(path.read_text())]


def _read_link(text: str, devices_per_node: int) -> Link | None:
    """The share of a device of "… 1600 Gb/s a node" or "… 200 Gb/s a device"; None: the profile's."""
    match = re.search(r"([\d.]+) Gb/s a (node|device)", text)
    if match is None:
        return None
    share = float(match[1]) / (devices_per_node if match[2] == "node" else 1)
    return Link(bandwidth_bytes_per_s=share * 1e9 / 8)
