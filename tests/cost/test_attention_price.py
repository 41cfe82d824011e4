"""Attention is priced as it was measured: cuDNN's kernel alone on one H200 (docs/hardware.md), bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.attention import AttentionCall
from shardwright.cost.attention import attention_flops, attention_time_s, written_out_bytes
from shardwright.cost.profiles import hardware_profile

#: Rows, heads, key heads, width, tokens, whether causal; milliseconds forward, and forward with backward.
MEASURED = [
    (2048, 16, 8, 128, 16384, True, 0.30, 1.34),
    (4096, 16, 8, 128, 16384, True, 0.53, 2.14),
    (4096, 16, 8, 64, 16384, True, 0.37, 1.44),
    (4096, 16, 16, 128, 16384, False, 0.85, 3.41),
    (8192, 16, 16, 128, 16384, True, 0.93, 3.69),
    (16384, 16, 16, 128, 16384, True, 1.77, 6.83),
    (32768, 8, 1, 128, 32768, True, 3.36, 13.4),
]
CALL = AttentionCall(
    backward=False, batch=4, heads=16, kv_heads=8, rows=4096, keys=4096, width=128, value_width=128,
    element_type="bf16", rows_first=False, scale=0.1, mask="causal",
)  # fmt: skip


def seconds(call: AttentionCall, device: str = "h200", **parts: int) -> float:
    """Of a part of a call on one device. parts: its batch, heads or rows."""
    part = replace(call, **parts)  # type: ignore[arg-type]
    return attention_time_s(call, [each.dimensions for each in part.operand_shapes], 0.0, hardware_profile(device))


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "width", "tokens", "causal", "forward_ms", "both_ms"), MEASURED)
def test_kernels_alone(
    rows: int, heads: int, kv_heads: int, width: int, tokens: int, causal: bool, forward_ms: float, both_ms: float
) -> None:
    call = replace(
        CALL, batch=tokens // rows, heads=heads, kv_heads=kv_heads, rows=rows, keys=rows, width=width,
        value_width=width, mask="causal" if causal else "none",
    )  # fmt: skip
    backward = replace(call, backward=True, statistics=False)
    assert 1e3 * seconds(call) == pytest.approx(forward_ms, rel=0.12)
    assert 1e3 * (seconds(call) + seconds(backward)) == pytest.approx(both_ms, rel=0.12)


def test_a_part_of_batch_and_heads_is_that_part_of_the_work() -> None:
    shapes = [each.dimensions for each in replace(CALL, batch=1, heads=4, kv_heads=2).operand_shapes]
    whole = [each.dimensions for each in CALL.operand_shapes]
    assert attention_flops(CALL, shapes) == attention_flops(CALL, whole) / 16


def test_of_causal_rows_that_are_split_the_last_ones_see_all_keys() -> None:
    assert seconds(CALL, rows=1024) == pytest.approx(seconds(replace(CALL, mask="none")) / 4, rel=0.1)


def test_a_window_leaves_out_what_it_hides() -> None:
    windows = [attention_flops(replace(CALL, window=window), [s.dimensions for s in CALL.operand_shapes])
               for window in (0, 4096, 512)]  # fmt: skip
    assert windows[0] == windows[1]
    assert windows[2] == pytest.approx(windows[0] * 2 * 512 * (4096 - 256) / 4096**2, rel=1e-3)


def test_devices_without_the_kernel_hold_scores() -> None:
    scores = 4 * 16 * 4096 * 4096 * 4
    size = CALL.operand_shapes[0].size_bytes
    assert written_out_bytes(CALL, size, hardware_profile("cpu")) >= scores
    assert written_out_bytes(CALL, size, hardware_profile("h100")) == 0
    assert written_out_bytes(replace(CALL, width=256), size, hardware_profile("a100")) >= scores
    assert seconds(CALL, "v100") > 10 * seconds(CALL, "h200")
