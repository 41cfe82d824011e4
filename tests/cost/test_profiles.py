"""Hardware profiles: every number has a source, an unknown name is refused."""

from __future__ import annotations

import pytest

from shardwright.cost import hardware_profile, known_profiles
from shardwright.errors import OptionError

WANTED = {"cpu", "v100", "a100", "h100", "h200", "b200", "tpu-v4", "tpu-v5e", "tpu-v5p"}


def test_known_profiles() -> None:
    assert set(known_profiles()) == WANTED


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
    assert 0 < profile.intra_node.latency_s <= profile.inter_node.latency_s


def test_reduced_precision_is_faster_where_the_datasheet_says_so() -> None:
    h100 = hardware_profile("h100")
    assert h100.matmul_flops_per_s("bf16") == pytest.approx(2 * h100.matmul_flops_per_s("f32"), rel=1e-3)
    assert h100.matmul_flops_per_s("u32") == h100.matmul_flops_per_s("default")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="abacus") as caught:
        hardware_profile("abacus")
    assert "tpu-v5e" in str(caught.value)
