"""Hardware profiles: the numbers every cost formula takes, read from `data/*.toml` with their sources."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.config import PlanOptions
from shardwright.errors import InternalError, OptionError

if TYPE_CHECKING:
    from shardwright.cluster import Cluster

#: Temporaries of which `Compiler.small_temporaries_margin` is needed: plans that `temporaries_margin` does not cover
#: have 3 and 15 MB of them (docs/benchmarks/memory.md).
SMALL_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device sends over one kind of link, in one direction."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """What the device's XLA compiler does that decides which values are stored, and how long.

    schedule: the order kernels run in, one of `cost.peak.schedule.SCHEDULES`.
    reduce_takes_in: what a reduction computes inside its own kernel: `loops` (whatever a kernel can) or
        `library` (what kernels of a library do, `peak.library`; where none is called, one elementwise instruction that
        nobody else reads).
    repeats_cheap: whether a cheap value that is stored for one reader is computed again by those that can.
    repeats_expensive: whether elementwise functions that take long, such as tanh, count as cheap for that.
    repeats_quotients: whether quotients and exponentials count as cheap for that.
    products_take_in: whether matrix products and convolutions compute elementwise operands inside their own kernel, and
        an elementwise instruction that alone reads their result as well.
    products_read_bf16: whether float32 values that only products read are stored, and sent, as bfloat16.
    merges_all_reduces: whether like all-reduces run as one, of whatever size (`cost.peak.combined`).
    creates_reduce_scatters: whether an all-reduce of which each device keeps a slice becomes a reduce-scatter, which
        stores that slice only.
    merges_before_partitioning: whether equal values are one before they are laid out (`cost.peak.duplicates`).
    splits_all_to_alls: whether an all-to-all sends pieces that kernels cut out before it, and what it receives is put
        together behind it.
    reduces_in_place: whether an all-reduce leaves its result where what it reduces was.
    copies_dot_operands: whether a product's operand is copied where its contracted dimensions do not lie side by side
        in the place its kernel expects; a convolution's, and its result, where their dimensions are in another order.
    folds_transposes: whether products read a transposed matrix as it was before.
    turns_convolved: whether convolutions read the program's arguments from copies with channels ahead of space, which
        serve both passes.
    inverts_divisors: whether a quotient by a spread divisor becomes a product with the inverse, spread.
    copies_relayouts: whether a reshape that changes the innermost dimension is a kernel of its own, which copies.
    copies_gathered: whether products read what was gathered along an inner dimension from a copy: an all-gather leaves
        that dimension outermost.
    turns_moved: whether collectives along inner dimensions have that dimension outermost in memory, so that kernels
        around them transpose (`cost.moves.relayout`).
    merges_loops: whether loops and reductions that read the same arrays run as one kernel, of which only what it reads
        and writes passes through memory (`planner.costs.traffic`); else they pay `fused_traffic` each.
    copies_donated: whether an argument that a result is written over is copied as the step begins, where no dependency
        says that all others have read it.
    copies_turned: whether what is written over an argument lies elsewhere first where its kernel reads what it is made
        of in another order.
    fills_donated: whether an argument that a result is written over is memory for others, from its last reader to then.
    turns_arguments: whether arguments that are elementwise with a transposed product are copied into its layout.
    computes_bf16_in_f32: whether bfloat16 is computed with, cut, gathered and sent as float32, and converted back.
    hoists_loop_invariants: what of that which a loop's body computes the same way every time is computed once, before
        it: `all`, `roundings` (of what products read) or `none`.
    scatters_compare: whether a scatter of one element into each row of zeros is computed by comparing indices, as
        elementwise instructions are, so that nothing of it is stored.
    expands_select_and_scatter: whether it is computed by arrays of the indices of all elements, a reduction of them by
        windows, and a scatter.
    hiding_option: XLA's option that has collectives run beside compute; empty where they do without, or cannot.
    chip_memory_bytes: memory on the chip in which the compiler keeps values that are read soon; 0 where it keeps none.
    product_workspace_bytes: what a product's or convolution's kernel needs while it runs, besides operands and result.
    temporaries_margin: part of the predicted temporaries that a device must have beyond them, so that no plan is
        called feasible that the compiler finds too large.
    small_temporaries_margin: the same of the first `SMALL_BYTES` of them: what is packed badly among few buffers is a
        larger part of them.
    """

    schedule: str
    reduce_takes_in: str
    repeats_cheap: bool
    repeats_expensive: bool
    repeats_quotients: bool
    products_take_in: bool
    products_read_bf16: bool
    merges_all_reduces: bool
    creates_reduce_scatters: bool
    merges_before_partitioning: bool
    splits_all_to_alls: bool
    reduces_in_place: bool
    copies_dot_operands: bool
    folds_transposes: bool
    turns_convolved: bool
    inverts_divisors: bool
    copies_relayouts: bool
    copies_gathered: bool
    turns_moved: bool
    merges_loops: bool
    copies_donated: bool
    copies_turned: bool
    fills_donated: bool
    turns_arguments: bool
    computes_bf16_in_f32: bool
    hoists_loop_invariants: str
    scatters_compare: bool
    expands_select_and_scatter: bool
    hiding_option: str
    chip_memory_bytes: int
    product_workspace_bytes: int
    temporaries_margin: float
    small_temporaries_margin: float

    def margin_bytes(self, temporaries_bytes: int) -> int:
        """Bytes that a device must have beyond the predicted temporaries of a plan."""
        small_bytes = min(temporaries_bytes, SMALL_BYTES)
        large_bytes = temporaries_bytes - small_bytes
        return ceil(self.small_temporaries_margin * small_bytes + self.temporaries_margin * large_bytes)

    def margin_within(self, limit_bytes: int) -> float:
        """Part of the temporaries that a device must have beyond them at least, if they take no more than a limit."""
        return self.margin_bytes(limit_bytes) / limit_bytes


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """One kind of device and the links between them.

    peak_flops_per_s: by HLO element type; `default` for types not named.
    matmul_efficiency: part of the peak that a large matrix product attains.
    vector_flops_per_s: operations a second outside matrix units (elementwise, reductions).
    memory_bandwidth_bytes_per_s / memory_bytes: of one device's own memory.
    launch_s: the least time one kernel takes.
    task_s: what a worker takes to start one task of a pipeline.
    fused_traffic: part of its operand and result bytes that an elementwise instruction
        really moves, because XLA fuses chains of them into one kernel.
    intra_node / inter_node: one device's link to the others of its node / to other nodes.
    collective_efficiency: part of a link's bandwidth that collectives attain.
    reduce_scatter_runs_as: the kind of collective whose time a reduce-scatter takes: its own, or an
        all-reduce's where devices run one and keep a slice (what is stored then: `Compiler.creates_reduce_scatters`).
    latency_counts: what a collective pays a link's latency for: each of its `ring-steps`, or each
        of the `members` of a group, where devices are threads that wait for one another.
    combiner_limits: kinds of collectives that a compiler combines where none waits for another, and up to how many
        bytes of their results.
    overlap: part of the time of gradient synchronisation that runs beside compute and costs no step time,
        as long as there is as much compute left to run beside.
    compiler: what its XLA does with buffers.
    sources: where each number comes from, by its path in the data file.
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
    overlap: float
    compiler: Compiler
    sources: Mapping[str, str]

    def matmul_flops_per_s(self, element_type: str) -> float:
        """Attainable operations a second of a matrix product on `element_type`."""
        peak = self.peak_flops_per_s.get(element_type)
        if peak is None:
            peak = self.peak_flops_per_s["default"]
        return peak * self.matmul_efficiency


def memory_limit_bytes(options: PlanOptions, cluster: Cluster, profile: HardwareProfile) -> int:
    """What a plan may take of one device: the budget of the options, else what the cluster file or the profile says.

    A budget as a part is one of what the device has. Raises OptionError for a budget over what the cluster file says.
    """
    has = cluster.memory_bytes_per_device or profile.memory_bytes
    if options.memory_fraction is not None:
        return int(has * options.memory_fraction)
    if cluster.memory_bytes_per_device and (options.memory_budget or 0) > has:
        raise OptionError(
            f"a budget of {options.memory_budget} bytes, but the cluster file gives a device {has}",
            where="memory_budget",
            remedy="lower the budget, or correct memory_gib in the cluster file",
        )
    return options.memory_budget or has


@cache
def list_profiles() -> tuple[str, ...]:
    """Names that `hardware_profile` accepts, sorted."""
    files = (resources.files("shardwright.cost") / "data").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


@cache
def hardware_profile(name: str) -> HardwareProfile:
    """The profile called `name`; OptionError, listing the known names, where there is none.

    `a100+h100` is what a program on devices of both finds: the slower of each, and the smaller memory. A path that ends
    in `.toml` is a profile of one's own, written as those in `shardwright/cost/data`.
    """
    if name.endswith(".toml"):
        return _profile_of_file(Path(name))
    if "+" in name:
        return _slowest(name, [hardware_profile(each) for each in name.split("+")])
    if name not in list_profiles():
        raise OptionError(
            f"no hardware profile is called {name!r}",
            where="hardware",
            remedy=f"use one of {', '.join(list_profiles())}",
        )
    text = (resources.files("shardwright.cost") / "data" / f"{name}.toml").read_text(encoding="utf-8")
    return _profile(name, tomllib.loads(text))


def _profile_of_file(path: Path) -> HardwareProfile:
    """A profile of one's own. OptionError where it cannot be read, or lacks a number."""
    try:
        return _profile(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
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
            bandwidth_bytes_per_s=min(each.bandwidth_bytes_per_s for each in links),
            latency_s=max(each.latency_s for each in links),
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
        sources={f"{profile.name}.{key}": text for profile in kinds for key, text in profile.sources.items()},
    )


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
        found = number(*path)
        if not 0 <= found <= 1:
            raise ValueError(f"{'.'.join(path)} is {found:g}, not between 0 and 1")
        return found

    def link(which: str) -> Link:
        return Link(bandwidth_bytes_per_s=number(which, "bandwidth_bytes_per_s"), latency_s=number(which, "latency_s"))

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
        overlap=part("overlap"),
        compiler=Compiler(**{field.name: value("compiler", field.name) for field in fields(Compiler)}),
        sources=sources,
    )
