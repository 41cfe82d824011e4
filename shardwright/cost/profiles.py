"""Hardware profiles: the numbers in all cost formulas, with their sources, read from `data/*.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cost.passes import Pass, read_passes
from shardwright.cost.tuning import SMALL_BYTES
from shardwright.errors import InternalError, OptionError
from shardwright.input_files import read_input_text
from shardwright.options.plan_options import PlanOptions

if TYPE_CHECKING:
    from shardwright.clusters.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Speed of one kind of link: bytes per second that one device sends in one direction, and latency in seconds."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """Behavior of the device's XLA compiler that decides the set of stored values and their lifetimes.

    passes: those that it runs, in XLA's order (`cost.passes`).
    schedule: the order of kernels, one of `cost.peak.schedule.SCHEDULES`.
    reduce_takes_in: the producers fused into a reduction: `loops` (everything a kernel can fuse) or `library` (library
        kernels, `peak.library_fusion`; without a library call, one elementwise instruction with no other reader).
    hoists_loop_invariants: the loop-invariant values computed once, before the loop: `all`, `roundings` (of products'
        operands) or `none`.
    hiding_option: XLA's option to overlap collectives with compute; empty if unneeded or unavailable.
    chip_memory_bytes: on-chip memory in which the compiler holds values until an early read; 0 without one.
    product_workspace_bytes: workspace of a product's or convolution's running kernel, besides operands and result.
    temporaries_margin: extra memory required, in parts of the predicted temporaries: keeps plans from being called
        feasible that the compiler finds too large.
    small_temporaries_margin: the same margin on the first `SMALL_BYTES` of temporaries: with few buffers, fragmentation
        is a larger part.
    """

    passes: tuple[Pass, ...]
    schedule: str
    reduce_takes_in: str
    hoists_loop_invariants: str
    hiding_option: str
    chip_memory_bytes: int
    product_workspace_bytes: int
    temporaries_margin: float
    small_temporaries_margin: float

    def runs(self, name: Pass) -> bool:
        return name in self.passes

    def margin_bytes(self, temporaries_bytes: int) -> int:
        """Bytes required on a device beyond a plan's predicted temporaries."""
        small_bytes = min(temporaries_bytes, SMALL_BYTES)
        large_bytes = temporaries_bytes - small_bytes
        return ceil(self.small_temporaries_margin * small_bytes + self.temporaries_margin * large_bytes)

    def margin_within(self, limit_bytes: int) -> float:
        """Minimum margin, in parts of the temporaries, over all temporaries up to a limit in bytes."""
        return self.margin_bytes(limit_bytes) / limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """A device's kernel of fused attention (`cost.attention`).

    max_width: of q, k and v, which are multiples of 8 wide. widths_may_differ: whether v may have another width.
    forward_efficiency / backward_efficiency: part of the peak attained, by width, in rising order.
    forward_extra_rows / backward_extra_rows: of a causal mask: x rows take 1 + extra / x times their operations.
    start_s: least time of a call.
    """

    max_width: int
    widths_may_differ: bool
    forward_efficiency: tuple[tuple[int, float], ...]
    backward_efficiency: tuple[tuple[int, float], ...]
    forward_extra_rows: int
    backward_extra_rows: int
    start_s: float

    def takes(self, element_type: str, width: int, value_width: int) -> bool:
        """Whether the kernel computes attention of this type and these widths."""
        fits = all(size <= self.max_width and size % 8 == 0 for size in (width, value_width))
        return element_type in ("bf16", "f16") and fits and (width == value_width or self.widths_may_differ)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host of a device: its memory, and the way there.

    memory_bytes: of the host's memory, one device's share.
    from_device_bytes_per_s, to_device_bytes_per_s: of one device's moves, each way.
    memory_bandwidth_bytes_per_s, flops_per_s: of one device's share of the host's processors.
    """

    memory_bytes: int
    from_device_bytes_per_s: float
    to_device_bytes_per_s: float
    memory_bandwidth_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedProducts:
    """How a device multiplies rows in groups (`cost.ragged`).

    masks_rows / masks_weights: whether its compiler multiplies all rows by every group's matrix, in products and in
        gradients of matrices. stores_masked: whether it stores the rows once per group for that.
    masked_efficiency: part of the peak that such products attain.
    kernel_efficiency: part of the peak that JAX's kernel attains, on `multiprocessors`; 0 without one.
    """

    masks_rows: bool
    masks_weights: bool
    stores_masked: bool
    masked_efficiency: float
    kernel_efficiency: float
    multiprocessors: int


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """One kind of device and the links between devices.

    peak_flops_per_s: by HLO element type; `default` covers types not named.
    matmul_efficiency: part of the peak attained by a large matrix product.
    vector_flops_per_s: operations a second outside matrix units (elementwise, reductions).
    memory_bandwidth_bytes_per_s / memory_bytes: of one device's own memory; bytes as far as programs may take them.
    launch_s: minimum time of one kernel.
    task_s: a worker's time to start one task of a pipeline.
    fused_traffic: part of an elementwise instruction's operand and result bytes really moved, given XLA's fusion of
        chains into one kernel.
    intra_node / inter_node: one device's link to the others of its node / to other nodes.
    collective_efficiency: part of a link's bandwidth attained by collectives.
    reduce_scatter_runs_as: the kind of collective that gives a reduce-scatter its time: its own, or an all-reduce's on
        devices that run one and slice the result (storage: the pass `creates_reduce_scatters`).
    latency_counts: the unit of latency of a collective: its `ring-steps`, or the `members` of a group (devices are
        threads waiting on one another).
    combiner_limits: kinds of independent collectives combined by the compiler, with the maximum bytes of their combined
        results.
    combiner_options: the compiler's options that set those limits, by kind; none where it has none.
    overlap: part of gradient synchronization time hidden behind compute, up to the compute left to hide it.
    compiler: its XLA's treatment of buffers.
    attention: its kernel of fused attention; None without one.
    host: its host; None where a profile says nothing of one.
    ragged: how it makes ragged products; None: its compiler has none, and they are written out.
    compute_capability, cudnn_version: of CUDA devices, `9.0` and `9.11`; empty elsewhere.
    sources: source of each number, by its path in the data file.
    """

    name: str
    description: str
    peak_flops_per_s: Mapping[str, float]
    matmul_efficiency: float
    vector_flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_s: float
    task_s: float
    fused_traffic: float
    intra_node: Link
    inter_node: Link
    collective_efficiency: float
    reduce_scatter_runs_as: str
    latency_counts: str
    combiner_limits: tuple[tuple[str, int], ...]
    combiner_options: tuple[tuple[str, str], ...]
    overlap: float
    compiler: Compiler
    attention: AttentionKernel | None
    host: Host | None
    ragged: RaggedProducts | None
    compute_capability: str
    cudnn_version: str
    sources: Mapping[str, str]

    def matmul_flops_per_s(self, element_type: str) -> float:
        """Attainable operations a second of a matrix product on `element_type`."""
        peak = self.peak_flops_per_s.get(element_type)
        if peak is None:
            peak = self.peak_flops_per_s["default"]
        return peak * self.matmul_efficiency

    def require_host(self) -> Host:
        """The device's host. Raises OptionError where the profile says nothing of one."""
        if self.host is None:
            raise OptionError(
                f"the program uses the memory of the host, of which the hardware profile {self.name} says nothing",
                where="hardware",
                remedy="write a section [host] as in shardwright/cost/data/h200.toml",
            )
        return self.host

    def with_bucket(self, bucket_bytes: int | None) -> HardwareProfile:
        """The profile of a compiler whose limits of combining are all set to `bucket_bytes`, where it has options for
        them; None leaves them."""
        if bucket_bytes is None:
            return self
        limits = dict(self.combiner_limits) | {kind: bucket_bytes for kind, _ in self.combiner_options}
        return replace(self, combiner_limits=tuple(limits.items()))

    def bucket_options(self, bucket_bytes: int | None) -> dict[str, int]:
        """The compiler's options, by name, that set its limits of combining so."""
        return {} if bucket_bytes is None else {option: bucket_bytes for _, option in self.combiner_options}


def memory_limit_bytes(options: PlanOptions, cluster: Cluster, profile: HardwareProfile) -> int:
    """Memory limit of a plan in bytes per device: the options' budget, else the cluster file's or the profile's memory,
    never more than a compiler gives programs (the pass `caps_memory`).

    A fractional budget is a fraction of the device's memory. Raises OptionError on a budget above the cluster file's
    memory.
    """
    has = _capped_bytes(cluster.memory_bytes_per_device or profile.memory_bytes, profile)
    if options.memory_fraction is not None:
        return int(has * options.memory_fraction)
    if cluster.memory_bytes_per_device and (options.memory_budget or 0) > cluster.memory_bytes_per_device:
        raise OptionError(
            f"a budget of {options.memory_budget} bytes, but the cluster file gives a device "
            f"{cluster.memory_bytes_per_device}",
            where="memory_budget",
            remedy="lower the budget, or correct memory_gib in the cluster file",
        )
    return _capped_bytes(options.memory_budget or has, profile)


def host_limit_bytes(cluster: Cluster, profile: HardwareProfile) -> int:
    """Bytes of the host's memory that a plan may take for one device: the cluster file's `host_memory_gib`, else the
    profile's. Raises OptionError where neither says."""
    return cluster.host_memory_bytes_per_device or profile.require_host().memory_bytes


def memory_cap_note(options: PlanOptions, cluster: Cluster, profile: HardwareProfile) -> str | None:
    """A sentence where a budget or a cluster file's memory is more than the compiler gives programs; else None."""
    asked = options.memory_budget or cluster.memory_bytes_per_device or 0
    if asked == _capped_bytes(asked, profile):
        return None
    source = "memory_budget" if options.memory_budget else "memory_gib of the cluster file"
    return (
        f"{source} says {_gib(asked)}; the compiler of {profile.name} gives programs {_gib(profile.memory_bytes)}, "
        "which is what the plan stays within"
    )


def _capped_bytes(memory_bytes: int, profile: HardwareProfile) -> int:
    return min(memory_bytes, profile.memory_bytes) if profile.compiler.runs("caps_memory") else memory_bytes


def _gib(memory_bytes: int) -> str:
    return f"{memory_bytes / 2**30:.2f} GiB"


@cache
def list_profiles() -> tuple[str, ...]:
    """Names that `hardware_profile` accepts, sorted."""
    files = (resources.files("shardwright.cost") / "data").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


@cache
def hardware_profile(name: str) -> HardwareProfile:
    """The profile called `name`. Raises OptionError, listing the known names, on an unknown one.

    `a100+h100` is the profile of a program on both devices: the slower of each speed, and the smaller memory. A path
    ending in `.toml` is a user's own profile, in the format of `shardwright/cost/data`.
    """
    if name.endswith(".toml"):
        return _profile_of_file(Path(name))
    if "+" in name:
        return _slowest(name, [hardware_profile(part) for part in name.split("+")])
    if name not in list_profiles():
        raise OptionError(
            f"no hardware profile is called {name!r}",
            where="hardware",
            remedy=f"use one of {', '.join(list_profiles())}",
        )
    text = (resources.files("shardwright.cost") / "data" / f"{name}.toml").read_text(encoding="utf-8")
    return _profile(name, tomllib.loads(text))


def platform_of_profile(name: str) -> str | None:
    """The platform of a profile's devices in JAX's spelling (`cpu`, `cuda`, `tpu`); None for a user's own profile."""
    kind = name.partition("+")[0]
    if kind not in list_profiles():
        return None
    if kind == "cpu":
        return kind
    return "tpu" if kind.startswith("tpu-") else "cuda"


def _profile_of_file(path: Path) -> HardwareProfile:
    """A user's own profile. Raises OptionError on an unreadable file or a missing number."""
    try:
        return _profile(path.stem, tomllib.loads(read_input_text(path)))
    except OSError as error:
        raise OptionError(
            f"the hardware profile {path} cannot be read: {error.strerror}", where="hardware", remedy="correct the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, InternalError, KeyError, TypeError, ValueError) as error:
        raise OptionError(
            f"{path} is no hardware profile: {error}",
            where="hardware",
            remedy="write each number of shardwright/cost/data/a100.toml, with its source",
        ) from None


def _slowest(name: str, kinds: Sequence[HardwareProfile]) -> HardwareProfile:
    types = dict.fromkeys(kind for profile in kinds for kind in profile.peak_flops_per_s)

    def link(which: str) -> Link:
        links: list[Link] = [getattr(profile, which) for profile in kinds]
        return Link(
            bandwidth_bytes_per_s=min(option.bandwidth_bytes_per_s for option in links),
            latency_s=max(option.latency_s for option in links),
        )

    return replace(
        kinds[0],
        name=name,
        description="the slower of " + ", ".join(profile.description for profile in kinds),
        peak_flops_per_s={kind: min(profile.matmul_flops_per_s(kind) for profile in kinds) for kind in types},
        matmul_efficiency=1.0,
        vector_flops_per_s=min(profile.vector_flops_per_s for profile in kinds),
        memory_bandwidth_bytes_per_s=min(profile.memory_bandwidth_bytes_per_s for profile in kinds),
        memory_bytes=min(profile.memory_bytes for profile in kinds),
        launch_s=max(profile.launch_s for profile in kinds),
        task_s=max(profile.task_s for profile in kinds),
        fused_traffic=max(profile.fused_traffic for profile in kinds),
        intra_node=link("intra_node"),
        inter_node=link("inter_node"),
        collective_efficiency=min(profile.collective_efficiency for profile in kinds),
        overlap=min(profile.overlap for profile in kinds),
        compiler=replace(
            kinds[0].compiler,
            hiding_option=max(profile.compiler.hiding_option for profile in kinds),
            temporaries_margin=max(profile.compiler.temporaries_margin for profile in kinds),
            small_temporaries_margin=max(profile.compiler.small_temporaries_margin for profile in kinds),
        ),
        attention=_common_kernel(kinds),
        host=_slowest_host(kinds),
        ragged=_common_ragged(kinds),
        compute_capability=_lowest_version(profile.compute_capability for profile in kinds),
        cudnn_version=_lowest_version(profile.cudnn_version for profile in kinds),
        sources={f"{profile.name}.{key}": text for profile in kinds for key, text in profile.sources.items()},
    )


def _slowest_host(kinds: Sequence[HardwareProfile]) -> Host | None:
    """The least of each number of the hosts; None where a profile has none."""
    hosts = [profile.host for profile in kinds if profile.host is not None]
    if len(hosts) < len(kinds):
        return None
    return Host(**{field.name: min(getattr(host, field.name) for host in hosts) for field in fields(Host)})


def _common_kernel(kinds: Sequence[HardwareProfile]) -> AttentionKernel | None:
    """The kernel of attention that all kinds have, with the least widths; None where one has none.

    The rates are those of the kind that attains the least.
    """
    kernels = [profile.attention for profile in kinds if profile.attention is not None]
    if len(kernels) < len(kinds):
        return None
    rates = [profile.peak_flops_per_s.get("bf16", 0.0) for profile in kinds]
    slowest = kernels[rates.index(min(rates))]
    return replace(
        slowest,
        max_width=min(kernel.max_width for kernel in kernels),
        widths_may_differ=all(kernel.widths_may_differ for kernel in kernels),
    )


def _common_ragged(kinds: Sequence[HardwareProfile]) -> RaggedProducts | None:
    """What all kinds do with ragged products, at the slowest one's rates; None where one has none."""
    own = [profile.ragged for profile in kinds if profile.ragged is not None]
    if len(own) < len(kinds):
        return None
    return RaggedProducts(
        masks_rows=any(each.masks_rows for each in own),
        masks_weights=any(each.masks_weights for each in own),
        stores_masked=any(each.stores_masked for each in own),
        masked_efficiency=min(each.masked_efficiency for each in own),
        kernel_efficiency=min(each.kernel_efficiency for each in own),
        multiprocessors=min(each.multiprocessors for each in own),
    )


def _lowest_version(versions: Iterable[str]) -> str:
    """The lowest of `9.0`, `10.0`, …; an empty one is lower than all."""
    return min(versions, key=lambda version: [int(part) for part in version.split(".") if part])


def _profile(name: str, data: dict[str, Any]) -> HardwareProfile:
    sources: dict[str, str] = {}

    def value(*path: str) -> Any:
        entry: Any = data
        for part in path:
            entry = entry[part]
        key = ".".join(path)
        if not entry.get("source"):
            raise InternalError(f"hardware profile {name}: {key} has no source")
        sources[key] = entry["source"]
        return entry["value"]

    def number(*path: str) -> float:
        return float(value(*path))

    def part(*path: str) -> float:
        value = number(*path)
        if not 0 <= value <= 1:
            raise ValueError(f"{'.'.join(path)} is {value:g}, not between 0 and 1")
        return value

    def version(which: str) -> str:
        text = str(value(which)) if which in data else ""
        if not re.fullmatch(r"(\d{1,3}\.\d{1,3})?", text):
            raise ValueError(f"{which} is {text!r}, no version such as 9.0")
        return text

    def link(which: str) -> Link:
        return Link(bandwidth_bytes_per_s=number(which, "bandwidth_bytes_per_s"), latency_s=number(which, "latency_s"))

    def compiler() -> Compiler:
        passes, reasons = read_passes(data["compiler"])
        sources.update({f"compiler.{name}": reason for name, reason in reasons.items()})
        others = [field.name for field in fields(Compiler) if field.name != "passes"]
        return Compiler(passes=passes, **{name: value("compiler", name) for name in others})

    def attention() -> AttentionKernel | None:
        if "attention" not in data:
            return None

        def by_width(which: str) -> tuple[tuple[int, float], ...]:
            widths = sorted(data["attention"][which], key=int)
            return tuple((int(width), part("attention", which, width)) for width in widths)

        return AttentionKernel(
            max_width=int(number("attention", "max_width")),
            widths_may_differ=bool(value("attention", "widths_may_differ")),
            forward_efficiency=by_width("forward_efficiency"),
            backward_efficiency=by_width("backward_efficiency"),
            forward_extra_rows=int(number("attention", "forward_extra_rows")),
            backward_extra_rows=int(number("attention", "backward_extra_rows")),
            start_s=number("attention", "start_s"),
        )

    def host() -> Host | None:
        if "host" not in data:
            return None
        numbers = {field.name: number("host", field.name) for field in fields(Host)}
        if min(numbers.values()) <= 0:
            raise ValueError("a number of [host] is not above 0")
        return Host(memory_bytes=int(numbers.pop("memory_bytes")), **numbers)

    def ragged() -> RaggedProducts | None:
        if "ragged" not in data:
            return None
        return RaggedProducts(
            masks_rows=bool(value("ragged", "masks_rows")),
            masks_weights=bool(value("ragged", "masks_weights")),
            stores_masked=bool(value("ragged", "stores_masked")),
            masked_efficiency=part("ragged", "masked_efficiency"),
            kernel_efficiency=part("ragged", "kernel_efficiency"),
            multiprocessors=int(number("ragged", "multiprocessors")),
        )

    return HardwareProfile(
        name=name,
        description=data["description"],
        peak_flops_per_s={kind: number("peak_flops_per_s", kind) for kind in data["peak_flops_per_s"]},
        matmul_efficiency=number("matmul_efficiency"),
        vector_flops_per_s=number("vector_flops_per_s"),
        memory_bandwidth_bytes_per_s=number("memory_bandwidth_bytes_per_s"),
        memory_bytes=int(number("memory_bytes")),
        launch_s=number("launch_s"),
        task_s=number("task_s"),
        fused_traffic=number("fused_traffic"),
        intra_node=link("intra_node"),
        inter_node=link("inter_node"),
        collective_efficiency=number("collective_efficiency"),
        reduce_scatter_runs_as=value("reduce_scatter_runs_as"),
        latency_counts=value("latency_counts"),
        combiner_limits=tuple((kind, int(number("combiner_limits", kind))) for kind in data.get("combiner_limits", ())),
        combiner_options=tuple((kind, value("combiner_options", kind)) for kind in data.get("combiner_options", ())),
        overlap=part("overlap"),
        compiler=compiler(),
        attention=attention(),
        host=host(),
        ragged=ragged(),
        compute_capability=version("compute_capability"),
        cudnn_version=version("cudnn_version"),
        sources=sources,
    )
