"""An attention call written out in StableHLO, for devices that have no kernel of it.

Products accumulate in float32, and scores, softmax and sums are float32; probabilities and their gradients are rounded
to the operands' type ahead of a product, as in kernels. Key heads are not repeated: arrays of query heads lie [batch,
key heads, group, rows, …]. The backward call computes the softmax again from scores: from statistics alone it would not
be a softmax where a mask's large number swallows the logarithm of the sum, which is in every row that is hidden whole.

What a mask hides gets the lowest float32; a row hidden whole is then spread evenly, as in frameworks. A bias of -inf in
a whole row gives NaN, as there. Rows beyond their length are zeros.

Dropout keeps what a hash of seed, sequence, head, row and key says, numbered in the whole call: forward and backward
agree, and however it is split the result is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.attention import AttentionCall
from shardwright.xla import private, tensors

#: What a hidden score becomes.
_HIDDEN = float(np.finfo(np.float32).min)

#: Dimensions of scores.
_BATCH, _KEY_HEADS, _GROUP, _ROWS, _KEYS = range(5)


def write_attention(call: AttentionCall, operands: Mapping[str, Any], firsts: Mapping[str, Any]) -> dict[str, Any]:
    """Results by role, without the workspace, of a device's operands by role.

    firsts: the numbers, scalars, of the device's first sequence (`batch`), query head (`heads`) and row (`rows`) in the
    whole call; asked for by dropout.
    """
    f32 = tensors.element_type("f32")
    arrays = {role: _heads_first(call, role, array) for role, array in operands.items()}
    q = _grouped(call, arrays["q"])
    scores = tensors.multiply_matrices(q, arrays["k"], 2, ([4], [3]), f32)
    shape = list(scores.type.shape)
    scores = _mul(scores, tensors.like(call.scale, scores))
    if call.bias:
        scores = _add(scores, _spread_bias(call, arrays["bias"], shape))
    visible, is_row = _visible(call, operands, shape)
    if visible is not None:
        scores = tensors.select(visible, scores, tensors.like(_HIDDEN, scores))
    highest = tensors.greatest(scores, [_KEYS])
    raised = _op("exponential", _sub(scores, _along_rows(highest, shape)))
    total = tensors.add_up(raised, [_KEYS])
    probabilities = _op("divide", raised, _along_rows(total, shape))
    if is_row is not None:
        probabilities = tensors.select(is_row, probabilities, tensors.like(0.0, probabilities))
    keep = _kept(call, firsts, shape) if call.dropout_rate else None
    if call.backward:
        return _gradients(call, arrays, q, probabilities, keep)
    dropped = _drop(call, probabilities, keep)
    out = tensors.multiply_matrices(_rounded(call, dropped), arrays["v"], 2, ([_KEYS], [2]), f32)
    results = {"out": _ungrouped(call, _rounded(call, out))}
    if call.statistics:
        statistics = _add(highest, _op("log", total))
        results["statistics"] = tensors.reshape(statistics, [call.batch, call.heads, call.rows])
    return results


def _gradients(call: AttentionCall, arrays: Mapping[str, Any], q: Any, probabilities: Any, keep: Any) -> dict[str, Any]:
    f32 = tensors.element_type("f32")
    dout = _grouped(call, arrays["dout"])
    both = _mul(tensors.convert(dout, f32), tensors.convert(_grouped(call, arrays["out"]), f32))
    delta = tensors.add_up(both, [4])
    dp = _drop(call, tensors.multiply_matrices(dout, arrays["v"], 2, ([4], [3]), f32), keep)
    ds = _mul(probabilities, _sub(dp, _along_rows(delta, dp.type.shape)))
    rounded = _rounded(call, ds)
    dq = tensors.multiply_matrices(rounded, arrays["k"], 2, ([_KEYS], [2]), f32)
    dk = tensors.multiply_matrices(rounded, q, 2, ([_GROUP, _ROWS], [2, 3]), f32)
    dropped = _rounded(call, _drop(call, probabilities, keep))
    dv = tensors.multiply_matrices(dropped, dout, 2, ([_GROUP, _ROWS], [2, 3]), f32)
    results = {
        "dq": _ungrouped(call, _rounded(call, _mul(dq, tensors.like(call.scale, dq)))),
        "dk": _rounded(call, _mul(dk, tensors.like(call.scale, dk))),
        "dv": _rounded(call, dv),
    }
    if call.bias_gradient:
        results["dbias"] = _rounded(call, _sum_to_bias(call, ds))
    return results


# ---- arrays ----------------------------------------------------------------
def _heads_first(call: AttentionCall, role: str, array: Any) -> Any:
    dims = dict(zip(call.operands, call.operand_dims, strict=True))[role]
    is_turned = len(dims) == 4 and dims[1] in "ts"
    return tensors.transpose(array, [0, 2, 1, 3]) if is_turned else array


def _grouped(call: AttentionCall, array: Any) -> Any:
    """An array of query heads, grouped by their key heads."""
    batch, _, *other = array.type.shape
    return tensors.reshape(array, [batch, call.kv_heads, call.heads // call.kv_heads, *other])


def _ungrouped(call: AttentionCall, array: Any) -> Any:
    batch, _, _, *other = array.type.shape
    return tensors.reshape(array, [batch, call.heads, *other])


def _rounded(call: AttentionCall, array: Any) -> Any:
    return tensors.convert(array, tensors.element_type(call.element_type))


def _along_rows(rows: Any, shape: Sequence[int]) -> Any:
    """One number a row, for every key."""
    return tensors.broadcast(rows, shape, [_BATCH, _KEY_HEADS, _GROUP, _ROWS])


def _spread_bias(call: AttentionCall, bias: Any, shape: Sequence[int]) -> Any:
    """The bias for every sequence and head."""
    repeated = _repeated_dims(call)
    dims = [dim for dim in range(5) if dim not in repeated]
    bias = tensors.reshape(tensors.convert(bias, tensors.element_type("f32")), [shape[dim] for dim in dims])
    return tensors.broadcast(bias, shape, dims)


def _sum_to_bias(call: AttentionCall, ds: Any) -> Any:
    repeated = _repeated_dims(call)
    return tensors.reshape(tensors.add_up(ds, repeated) if repeated else ds, call.bias)


def _repeated_dims(call: AttentionCall) -> list[int]:
    """The dimensions of scores along which the bias is one."""
    repeated = [_BATCH] if call.bias[0] == 1 else []
    return repeated + ([_KEY_HEADS, _GROUP] if call.bias[1] == 1 else [])


# ---- masks -----------------------------------------------------------------
def _visible(call: AttentionCall, operands: Mapping[str, Any], shape: Sequence[int]) -> tuple[Any, Any]:
    """Which keys the mask leaves to each row, None for all; and which rows are within their length, None for all."""
    s32 = tensors.element_type("s32")
    conditions = []
    if call.is_causal:
        ahead = _sub(tensors.iota(shape, _ROWS, s32), tensors.iota(shape, _KEYS, s32))
        conditions.append(tensors.compare(ahead, tensors.like(0, ahead), "GE"))
        if call.window:
            conditions.append(tensors.compare(ahead, tensors.like(call.window, ahead), "LT"))
    is_row = None
    if call.has_lengths:
        q_lengths, kv_lengths = (
            tensors.broadcast(operands[role], shape, [_BATCH]) for role in ("q_lengths", "kv_lengths")
        )
        conditions.append(tensors.compare(tensors.iota(shape, _KEYS, s32), kv_lengths, "LT"))
        is_row = tensors.compare(tensors.iota(shape, _ROWS, s32), q_lengths, "LT")
    visible = None
    for condition in conditions:
        visible = condition if visible is None else _op("and", visible, condition)
    return visible, is_row


# ---- dropout ---------------------------------------------------------------
def _drop(call: AttentionCall, array: Any, keep: Any) -> Any:
    if keep is None:
        return array
    factor = 1 / (1 - call.dropout_rate) if call.dropout_rate < 1 else 0.0
    scaled = _mul(array, tensors.like(factor, array))
    return tensors.select(keep, scaled, tensors.like(0.0, scaled))


def _kept(call: AttentionCall, firsts: Mapping[str, Any], shape: Sequence[int]) -> Any:
    """Which probabilities stay: those whose hash is not among the lowest, a share of `dropout_rate`."""
    u32 = tensors.element_type("u32")
    rows = shape[:_KEYS]
    heads = [call.batch, call.heads, call.rows]
    state = tensors.number(call.seed % 2**32, tensors.tensor_type(heads, u32))
    for dim, name in enumerate(("batch", "heads", "rows")):
        first = tensors.broadcast(tensors.convert(firsts[name], u32), heads, [])
        state = _mix(_op("xor", state, _scattered(_add(tensors.iota(heads, dim, u32), first))))
    state = _along_rows(tensors.reshape(state, rows), shape)
    state = _mix(_op("xor", state, _scattered(tensors.iota(shape, _KEYS, u32))))
    limit = min(int(call.dropout_rate * 2**32), 2**32 - 1)
    return tensors.compare(state, tensors.like(limit, state), "GE")


def _scattered(numbers: Any) -> Any:
    """Consecutive numbers from 1 on, far apart: times 2³² over the golden ratio."""
    return _mul(_add(numbers, tensors.like(1, numbers)), tensors.like(0x9E3779B9, numbers))


def _mix(state: Any) -> Any:
    """MurmurHash3's finalizer: every bit of a number depends on every bit."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0)):
        state = _op("xor", state, _op("shift_right_logical", state, tensors.like(shift, state)))
        if factor:
            state = _mul(state, tensors.like(factor, state))
    return state


# ---- operations --------------------------------------------------------------
def _op(name: str, *arrays: Any) -> Any:
    """An operation element by element."""
    return (
        private.ir().Operation.create(f"stablehlo.{name}", results=[arrays[0].type], operands=list(arrays)).results[0]
    )


def _add(one: Any, other: Any) -> Any:
    return _op("add", one, other)


def _sub(one: Any, other: Any) -> Any:
    return _op("subtract", one, other)


def _mul(one: Any, other: Any) -> Any:
    return _op("multiply", one, other)
