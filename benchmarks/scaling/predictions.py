"""Predicted steps on one device and on many, and the efficiency that follows."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardwright as sw
from benchmarks.scaling.published import BATCH, PUBLISHED
from benchmarks.scaling.settings import PROFILE, Setting, build_cluster, write_profile
from shardwright.cost import hardware_profile
from shardwright.plans.plan import Plan
from workloads.image_classifiers.networks import CLASSIFIERS, build

#: Two parts of the peak, from whose steps it follows which part attains a rate.
_TRIED = (0.5, 1.0)

#: Nothing is computed again to save memory, as in the published runs; predictions say what memory that takes.
_ALL_KEPT: dict[str, Any] = {"remat": "none", "micro_batches": 1, "memory_budget": "64GB"}

#: `data` parallelism, forced, and the free `search` over all meshes.
STRATEGIES = ("data", "search")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One plan. Seconds of a step; step_s is without what inputs take to arrive, unless the setting sends them.

    one_step_s: of one device. gap: to the search's bound. device_bytes: predicted peak of a device.
    matmul_efficiency: part of the peak that products attain. plan_s, cpu_s: what planning took. process_bytes: peak of
    this process until then.
    """

    model: str
    setting: str
    strategy: str
    devices: int
    mesh: str
    one_step_s: float
    step_s: float
    compute_s: float
    communication_s: float
    hidden_s: float
    gap: float
    device_bytes: int
    matmul_efficiency: float
    plan_s: float
    cpu_s: float
    process_bytes: int

    @property
    def efficiency(self) -> float:
        """Step on one device ÷ step on N with N times its images: images a second of N ÷ those of N single devices."""
        return self.one_step_s / self.step_s

    @property
    def least_efficiency(self) -> float:
        """The same where nothing runs beside compute. Of a forced strategy: a search would find another plan then."""
        return self.one_step_s / (self.step_s + self.hidden_s)


def find_matmul_efficiency(steps_s: Sequence[float], wanted_s: float, parts: Sequence[float] = _TRIED) -> float:
    """The part e of the peak with which a step takes `wanted_s`, from the steps of two parts tried.

    A step takes a / e + b: a for products at their peak, b for all that is bound by memory.

    Raises ValueError if b alone takes as long.
    """
    product_s = (steps_s[0] - steps_s[1]) / (1 / parts[0] - 1 / parts[1])
    rest_s = steps_s[0] - product_s / parts[0]
    if rest_s >= wanted_s:
        raise ValueError(f"{rest_s:.4f} s of a step are no products: it cannot take {wanted_s:.4f} s")
    return product_s / (wanted_s - rest_s)


class Predictor:
    """Plans steps of one model.

    directory: for the profiles that it needs. deadline_s: of a search.
    """

    def __init__(self, model: str, directory: Path, *, deadline_s: float = 60.0) -> None:
        self.model = model
        self._options = {"data": {"force": "data", **_ALL_KEPT}, "search": {"stages": 1, "deadline": deadline_s}}
        self._directory = directory
        self._one_text = self._lower(1, is_local=True)
        self._ones: dict[str, Plan] = {}
        self._calibrated = self._write_profile(self._calibrate())

    def predict(self, settings: Mapping[str, Setting], devices: int, strategy: str) -> Iterator[Prediction]:
        """A prediction in each of the settings, by name."""
        texts: dict[bool, str] = {}
        for name, setting in settings.items():
            if setting.is_local not in texts:
                texts[setting.is_local] = self._lower(devices, is_local=setting.is_local)
            yield self._predict(texts[setting.is_local], name, setting, devices, strategy)

    def _predict(self, text: str, name: str, setting: Setting, devices: int, strategy: str) -> Prediction:
        hardware = self._calibrated if setting.is_calibrated else PROFILE
        one = self._plan_one(hardware)
        start_s, start_cpu_s = time.monotonic(), _cpu_s()
        plan = _plan(text, build_cluster(devices, setting, hardware), **self._options[strategy])
        one_left_out_s, left_out_s = (0.0 if setting.sends_inputs else arrival_s(each) for each in (one, plan))
        return Prediction(
            model=self.model,
            setting=name,
            strategy=strategy,
            devices=devices,
            mesh=str(plan.mesh),
            one_step_s=one.cost.step_s - one_left_out_s,
            step_s=plan.cost.step_s - left_out_s,
            compute_s=plan.cost.compute_s,
            communication_s=plan.cost.communication_s - left_out_s,
            hidden_s=plan.cost.hidden_s,
            gap=1 - plan.cost.lower_bound_s / plan.cost.step_s,
            device_bytes=plan.memory.peak_bytes,
            matmul_efficiency=hardware_profile(hardware).matmul_efficiency,
            plan_s=time.monotonic() - start_s,
            cpu_s=_cpu_s() - start_cpu_s,
            process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        )

    def _plan_one(self, hardware: str) -> Plan:
        """The plan of a step on one device, which every search finds."""
        if hardware not in self._ones:
            cluster = build_cluster(1, Setting(), hardware)
            self._ones[hardware] = _plan(self._one_text, cluster, effort="fast", **_ALL_KEPT)
        return self._ones[hardware]

    def _calibrate(self) -> float:
        """The part of the peak with which one device attains the published rate."""
        steps_s = [self._plan_one(self._write_profile(part)).cost.compute_s for part in _TRIED]
        return find_matmul_efficiency(steps_s, BATCH / PUBLISHED[self.model].images_per_s)

    def _write_profile(self, matmul_efficiency: float) -> str:
        return str(write_profile(self._directory, matmul_efficiency))

    def _lower(self, devices: int, *, is_local: bool) -> str:
        """The HLO text of a step on all devices' images."""
        case = build(CLASSIFIERS[self.model], BATCH * devices, groups=devices if is_local else 1)
        return sw.lower(case.step, *case.avals, donate_argnums=(0, 1), platform="cuda").as_text()


def arrival_s(plan: Plan) -> float:
    """Seconds that a step waits for arguments sent by a client: communication that is no collective."""
    moving_s = sum(collective.time_s for collective in plan.collectives)
    return plan.cost.communication_s + plan.cost.hidden_s - moving_s


def _plan(text: str, cluster: sw.Cluster, **options: Any) -> Plan:
    plan = sw.plan(text, cluster, cache=False, **options)
    assert isinstance(plan, Plan), "stages=1 or a forced strategy: one program"
    return plan


def _cpu_s() -> float:
    """Of this process and its children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
