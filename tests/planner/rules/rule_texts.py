"""Instructions that JAX lowers to nothing on CPU, or only on other platforms, as HLO text."""

from __future__ import annotations


def _module(root: str, *parameters: str, region: str = "") -> str:
    lines = [f"  p{i} = {shape} parameter({i})" for i, shape in enumerate(parameters)]
    return "\n".join(["HloModule m", "", region, "ENTRY main {", *lines, f"  ROOT r = {root}", "}", ""])


_ADD = "add { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT r = f32[] add(a, b) }\n"

TEXTS = {
    "cholesky": _module("f32[4,8,8] cholesky(p0), lower=true", "f32[4,8,8]"),
    "solve_left": _module(
        "f32[4,8,12] triangular-solve(p0, p1), left_side=true, lower=true, unit_diagonal=true, "
        "transpose_a=NO_TRANSPOSE", "f32[4,8,8]", "f32[4,8,12]",
    ),
    "solve_right": _module(
        "f32[4,12,8] triangular-solve(p0, p1), left_side=false, lower=true, unit_diagonal=true, "
        "transpose_a=TRANSPOSE", "f32[4,8,8]", "f32[4,12,8]",
    ),
    "map": _module("f32[4,8] map(p0, p1), dimensions={0,1}, to_apply=add", "f32[4,8]", "f32[4,8]", region=_ADD),
    "stochastic": _module("s8[4,8] stochastic-convert(p0, p1)", "f32[4,8]", "u32[4,8]"),
    "random_bits": _module("(u64[2], u32[4,8]) rng-bit-generator(p0), algorithm=rng_three_fry", "u64[2]"),
    "random_philox": _module("(u64[2], u32[4,8]) rng-bit-generator(p0), algorithm=rng_philox", "u64[2]"),
    "normalize": _module(
        "f32[4,8,8,4] batch-norm-inference(p0, p1, p2, p3, p4), epsilon=1, feature_index=3",
        "f32[4,8,8,4]", *["f32[4]"] * 4,
    ),
    "normalize_training": _module(
        "(f32[4,8,8,4], f32[4], f32[4]) batch-norm-training(p0, p1, p2), epsilon=1, feature_index=3",
        "f32[4,8,8,4]", "f32[4]", "f32[4]",
    ),
    "normalize_gradient": _module(
        "(f32[4,8,8,4], f32[4], f32[4]) batch-norm-grad(p0, p1, p2, p3, p4), epsilon=2, feature_index=3",
        "f32[4,8,8,4]", "f32[4]", "f32[4]", "f32[4]", "f32[4,8,8,4]",
    ),
    "fourier_batch": _module("c64[4,8,16] fft(p0), fft_type=FFT, fft_length={16}", "c64[4,8,16]"),
    "fourier_real": _module("c64[4,8,9] fft(p0), fft_type=RFFT, fft_length={16}", "f32[4,8,16]"),
    "largest": _module("(f32[4,8,4], s32[4,8,4]) topk(p0), k=4, largest=true", "f32[4,8,16]"),
    "largest_call": _module('(f32[8,4], s32[8,4]) custom-call(p0), custom_call_target="TopK"', "f32[8,16]"),
    "prefix": _module(
        "f32[4,8] reduce-window(p0, p1), window={size=1x8 pad=0_0x7_0}, to_apply=add", "f32[4,8]", "f32[]", region=_ADD
    ),
}  # fmt: skip

#: XLA:CPU has no kernel for these: they are partitioned, not run.
RAGGED = {
    "ragged": _module(
        "f32[16,12] ragged-dot(p0, p1, p2), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
        "lhs_ragged_dims={0}, rhs_group_dims={0}", "f32[16,8]", "f32[4,8,12]", "s32[4]",
    ),
    "ragged_rows": _module(
        "f32[16,4,12] ragged-dot(p0, p1, p2), lhs_contracting_dims={2}, rhs_contracting_dims={1}, "
        "lhs_ragged_dims={0}, rhs_group_dims={0}", "f32[16,4,8]", "f32[4,8,12]", "s32[4]",
    ),
    "ragged_batch": _module(
        "f32[4,16,12] ragged-dot(p0, p1, p2), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_contracting_dims={2}, lhs_ragged_dims={1}, rhs_group_dims={1}", "f32[4,16,8]", "f32[4,4,8,12]", "s32[4,4]",
    ),
    "ragged_gradient": _module(
        "f32[4,8,12] ragged-dot(p0, p1, p2), lhs_contracting_dims={0}, rhs_contracting_dims={0}, lhs_ragged_dims={0}",
        "f32[16,8]", "f32[16,12]", "s32[4]",
    ),
}  # fmt: skip
