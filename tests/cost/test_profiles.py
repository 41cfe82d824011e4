"""Hardware profiles: every number has a source, an unknown name is refused."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.cost import hardware_profile, list_profiles
from shardwright.cost.passes import PASSES
from shardwright.cost.profiles import memory_cap_note, memory_limit_bytes
from shardwright.cost.tuning import SMALL_BYTES
from shardwright.errors import OptionError
from shardwright.options.plan_options import PlanOptions


def cluster(memory_bytes: int | None) -> Cluster:
    return Cluster(
        name="test",
        nodes=(ClusterNode(index=0, ip="127.0.0.1", port=1, device_count=8),),
        memory_bytes_per_device=memory_bytes,
    )


#: What the TPU compiler gives programs (libtpu 0.0.42.1), GiB of a device.
TPU_GIB = {"tpu-v4": 30.75, "tpu-v5e": 15.75, "tpu-v5p": 95.74, "tpu-v6e": 31.25, "tpu-7x": 94.75}
WANTED = {"cpu", "p100", "v100", "a100", "h100", "h200", "b200", "gb200", *TPU_GIB}


def test_known_profiles() -> None:
    assert set(list_profiles()) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_numbers_are_positive_and_have_sources(name: str) -> None:
    profile = hardware_profile(name)
    for path in ("memory_bandwidth_bytes_per_s", "memory_bytes", "launch_s", "peak_flops_per_s.default"):
        assert profile.sources[path]
    assert profile.memory_bandwidth_bytes_per_s > 0
    assert profile.memory_bytes > 2**30
    assert 0 < profile.launch_s < 1e-3
    assert 0 < profile.matmul_efficiency <= 1
    assert 0 < profile.fused_traffic <= 1
    assert profile.reduce_scatter_runs_as in ("reduce-scatter", "all-reduce")
    assert profile.sources["reduce_scatter_runs_as"]
    assert profile.latency_counts in ("ring-steps", "members")
    assert profile.intra_node.bandwidth_bytes_per_s >= profile.inter_node.bandwidth_bytes_per_s > 0
    assert 0 <= profile.overlap <= 1
    assert profile.sources["overlap"]
    assert 0 < profile.intra_node.latency_s <= profile.inter_node.latency_s


def test_the_memory_of_a_device_by_budget_cluster_file_and_profile() -> None:
    a100 = hardware_profile("a100")
    plain, told = cluster(None), cluster(20 << 30)
    assert memory_limit_bytes(PlanOptions(), plain, a100) == a100.memory_bytes
    assert memory_limit_bytes(PlanOptions(), told, a100) == 20 << 30
    assert memory_limit_bytes(PlanOptions(memory_fraction=0.25), told, a100) == 5 << 30
    assert memory_limit_bytes(PlanOptions(memory_budget=1 << 30), told, a100) == 1 << 30
    assert memory_limit_bytes(PlanOptions(memory_budget=1 << 40), plain, a100) == 1 << 40
    with pytest.raises(OptionError, match="the cluster file gives a device") as caught:
        memory_limit_bytes(PlanOptions(memory_budget=21 << 30), told, a100)
    assert caught.value.where == "memory_budget"


@pytest.mark.parametrize(("name", "usable_gib"), TPU_GIB.items())
def test_no_plan_takes_more_of_a_tpu_than_its_compiler_gives(name: str, usable_gib: float) -> None:
    """Whatever a cluster file or a budget says: chips are sold with more than programs get."""
    profile = hardware_profile(name)
    nominal = cluster(128 << 30)
    for options, given in (
        (PlanOptions(), cluster(None)),
        (PlanOptions(), nominal),
        (PlanOptions(memory_budget=120 << 30), nominal),
        (PlanOptions(memory_budget=120 << 30), cluster(None)),
    ):
        limit_gib = memory_limit_bytes(options, given, profile) / 2**30
        assert usable_gib - 0.02 < limit_gib <= usable_gib
    assert memory_limit_bytes(PlanOptions(memory_fraction=0.5), nominal, profile) == profile.memory_bytes // 2
    assert memory_limit_bytes(PlanOptions(), cluster(4 << 30), profile) == 4 << 30
    assert memory_cap_note(PlanOptions(), nominal, profile) == (
        f"memory_gib of the cluster file says 128.00 GiB; the compiler of {name} gives programs "
        f"{profile.memory_bytes / 2**30:.2f} GiB, which is what the plan stays within"
    )
    assert "memory_budget" in (memory_cap_note(PlanOptions(memory_budget=120 << 30), nominal, profile) or "")
    assert memory_cap_note(PlanOptions(), cluster(None), profile) is None


def test_cards_of_a_gpu_may_have_more_than_the_profile() -> None:
    more = cluster(94 << 30)
    assert memory_limit_bytes(PlanOptions(), more, hardware_profile("h100")) == 94 << 30
    assert memory_cap_note(PlanOptions(), more, hardware_profile("h100")) is None


def test_reduced_precision_is_faster_where_the_datasheet_says_so() -> None:
    h100 = hardware_profile("h100")
    assert h100.matmul_flops_per_s("bf16") == pytest.approx(2 * h100.matmul_flops_per_s("f32"), rel=1e-3)
    assert h100.matmul_flops_per_s("u32") == h100.matmul_flops_per_s("default")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="abacus") as caught:
        hardware_profile("abacus")
    assert "tpu-v5e" in str(caught.value)


def test_the_margin_of_memory_is_a_larger_part_of_few_temporaries() -> None:
    compiler = hardware_profile("cpu").compiler
    few, many = 15 << 20, 4 << 30
    assert compiler.margin_bytes(few) >= 0.14 * few  # a Llama of this size is predicted at 0.88
    assert compiler.margin_bytes(many) <= 0.062 * many
    assert compiler.margin_bytes(few) < compiler.margin_bytes(SMALL_BYTES) < compiler.margin_bytes(many)
    gpu = hardware_profile("a100").compiler
    assert gpu.margin_bytes(few) >= 0.12 * few  # a GPT-2 of this size is predicted at 0.895
    assert gpu.margin_bytes(many) <= 0.075 * many


@pytest.mark.parametrize("overlap", ["1.5", "-0.1", "nan"])
def test_a_profile_of_ones_own_hides_no_more_than_all(tmp_path: Path, overlap: str) -> None:
    text = (resources.files("shardwright.cost") / "data" / "a100.toml").read_text(encoding="utf-8")
    whole, wrong = tmp_path / "whole.toml", tmp_path / "wrong.toml"
    whole.write_text(text.replace("overlap = { value = 0.0", "overlap = { value = 1.0"))
    wrong.write_text(text.replace("overlap = { value = 0.0", f"overlap = {{ value = {overlap}"))
    assert hardware_profile(str(whole)).overlap == 1
    with pytest.raises(OptionError, match=r"overlap is .*, not between 0 and 1"):
        hardware_profile(str(wrong))


@pytest.mark.parametrize("name", sorted(WANTED))
def test_each_pass_runs_or_is_left_out_for_a_reason(name: str) -> None:
    profile = hardware_profile(name)
    data = tomllib.loads(data_of(name))["compiler"]
    listed = [entry["name"] for entry in data["passes"]]
    assert tuple(listed) == profile.compiler.passes, "in XLA's order"
    assert sorted([*listed, *data["without"]]) == sorted(PASSES)
    assert all(profile.sources[f"compiler.{one}"] for one in PASSES)


def data_of(name: str) -> str:
    return (resources.files("shardwright.cost") / "data" / f"{name}.toml").read_text(encoding="utf-8")


def with_keys_of_before(text: str) -> str:
    """The file of a profile with a key of true or false for each pass, instead of a list."""
    data = tomllib.loads(text)["compiler"]
    runs = {entry["name"]: entry["source"] for entry in data["passes"]}
    keys = [f"{name} = {{ value = true, source = {json.dumps(source)} }}" for name, source in runs.items()]
    keys += [f"{name} = {{ value = false, source = {json.dumps(source)} }}" for name, source in data["without"].items()]
    listed, rest = re.search(r"passes = \[\n.*?^\]\n", text, re.DOTALL | re.MULTILINE), text.index("[compiler.without]")
    assert listed is not None
    return text[: listed.start()] + text[listed.end() : rest] + "\n".join(keys) + "\n"


@pytest.mark.parametrize("name", ["cpu", "a100", "tpu-v5e"])
def test_a_file_with_the_keys_of_before_is_the_same_profile(tmp_path: Path, name: str) -> None:
    own = tmp_path / f"{name}.toml"
    own.write_text(with_keys_of_before(data_of(name)))
    assert hardware_profile(str(own)) == hardware_profile(name)


def test_why_passes_do_not_run_may_be_left_out(tmp_path: Path) -> None:
    own, text = tmp_path / "a100.toml", data_of("a100")
    own.write_text(text[: text.index("[compiler.without]")])
    assert hardware_profile(str(own)).compiler == hardware_profile("a100").compiler


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '{ name = "turns_convolved"',
            '{ name = "turns_around"',
            "'turns_around' of compiler.passes is no pass; write",
        ),
        ('{ name = "turns_convolved"', '{ name = "copies_donated"', "'copies_donated' is listed twice"),
        ("passes = [", "passed = [", "compiler.passes is missing: list the passes"),
        (
            "passes = [",
            'caps_memory = { value = true, source = "s" }\npasses = [',
            "caps_memory stands beside compiler",
        ),
        ('copies_donated = "', 'copies_donated = "" # "', "'copies_donated' has no source"),
    ],
)
def test_wrong_lists_of_passes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = data_of("a100")
    assert old in text
    own = tmp_path / "own.toml"
    own.write_text(text.replace(old, new, 1))
    with pytest.raises(OptionError, match=re.escape(message)):
        hardware_profile(str(own))
