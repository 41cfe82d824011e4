"""How devices compute an attention call part by part, by the layouts that a plan gives its operands.

Batch, heads and rows of q may be split; keys and widths are whole. Key heads are split as the query heads that read
them, or over the first of their axes, or not at all: then each device picks the key heads of its query heads. Results
lie as the operands do. Gradients of what several devices read (keys and values of split rows, or of query heads that
share a key head; a bias of a split batch) are partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from shardwright.attention import AttentionCall
from shardwright.errors import PlanError
from shardwright.plans.shardings import Mesh, TensorSharding

#: What split rows make of a mask: rows are numbered from the device's first one, so that a bias has to hide keys.
_WITHOUT_ROW_NUMBERS = {"causal": "none", "padding_causal": "padding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Numbers of the devices' first elements along a dimension: `step` times the device's place along `axes`."""

    axes: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParts:
    """A call's part on each device, and how parts make up the whole.

    whole, part: calls. results: by role, a result's layout before its sum; without the workspace. summed: by role, the
    axes over which it is added up. kv_heads: key heads that a device has. shared_by: query heads of the whole call that
    read one key head, if the device picks their key heads; else 0. offsets: of `batch`, `heads` and `rows`, and of
    query heads among those that the device's key heads serve (`picked`).
    """

    whole: AttentionCall
    part: AttentionCall
    results: Mapping[str, TensorSharding]
    summed: Mapping[str, tuple[str, ...]]
    kv_heads: int
    shared_by: int
    offsets: Mapping[str, Offset]

    @property
    def masks_by_bias(self) -> bool:
        """Whether a bias hides keys from rows, because rows of a causal mask are split."""
        return self.part.mask != self.whole.mask

    @property
    def counts_rows(self) -> bool:
        """Whether masks and lengths depend on the number of the device's first row."""
        return bool(self.offsets["rows"].axes) and (self.whole.is_causal or self.whole.has_lengths)

    @property
    def is_split(self) -> bool:
        return any(offset.axes for offset in self.offsets.values())


def split_attention(call: AttentionCall, operands: Sequence[TensorSharding], mesh: Mesh) -> AttentionParts:
    """The parts of a call whose operands lie so.

    Raises PlanError for layouts that no rule gives: keys or widths split, operands that disagree, query heads that are
    cut where their key heads are not.
    """
    axes = _axes_by_letter(call, operands)
    counts = {letter: mesh.size(axes[letter]) for letter in axes}
    batch, heads, rows = (-(-call.sizes[letter] // counts[letter]) for letter in "bnt")
    apart = axes["n"][len(axes["k"]) :]
    held = -(-call.kv_heads // counts["k"])
    group = call.heads // call.kv_heads
    picks = heads != held * group
    if picks:
        _require_aligned_heads(call, axes, counts)
    kv_heads = heads // gcd(heads, group) if picks else held
    mask, window, bias = call.mask, call.window, call.bias
    if bias:
        bias = (min(bias[0], batch), min(bias[1], heads), rows, call.keys)
    if call.is_causal and axes["t"]:
        mask, window, bias = _WITHOUT_ROW_NUMBERS[mask], 0, bias or (1, 1, rows, call.keys)
    results = {role: _lay_out(call, role, dims, axes) for role, dims in _results(call)}
    at_work = {axis for letter in "bnt" for axis in axes[letter]}
    return AttentionParts(
        whole=call,
        part=replace(call, batch=batch, heads=heads, kv_heads=kv_heads, rows=rows, mask=mask, window=window, bias=bias),
        results=results,
        summed={
            role: tuple(axis for axis in mesh.sizes if axis in at_work.difference(lies.axes))
            for role, lies in results.items()
        },
        kv_heads=held,
        shared_by=group if picks else 0,
        offsets={
            "batch": Offset(axes=axes["b"], step=batch),
            "heads": Offset(axes=axes["n"], step=heads),
            "rows": Offset(axes=axes["t"], step=rows),
            "picked": Offset(axes=apart, step=heads),
        },
    )


def _results(call: AttentionCall) -> list[tuple[str, str]]:
    """Role and dimensions of each result that is an array."""
    pairs = zip(call.results, call.result_dims, strict=True)
    return [(role, dims) for role, dims in pairs if role != "workspace"]


def _axes_by_letter(call: AttentionCall, operands: Sequence[TensorSharding]) -> dict[str, tuple[str, ...]]:
    """The axes that split each dimension of the call."""
    axes: dict[str, tuple[str, ...]] = {}
    for role, dims, lies in zip(call.operands, call.operand_dims, operands, strict=True):
        for number, (letter, split) in enumerate(zip(dims, lies.dims, strict=True)):
            if role == "bias" and call.bias[number] == 1 and not split:
                continue
            if axes.setdefault(letter, split) != split:
                raise _refuse(call, f"{role} lies {lies}, unlike q")
    if any(axes[letter] for letter in "sde"):
        raise _refuse(call, "keys or widths are split")
    if axes["n"][: len(axes["k"])] != axes["k"]:
        raise _refuse(call, "key heads are split over axes of no query heads")
    return axes


def _require_aligned_heads(call: AttentionCall, axes: Mapping[str, tuple[str, ...]], counts: Mapping[str, int]) -> None:
    """Query heads of a part read key heads of the same part."""
    if axes["k"] and (call.kv_heads % counts["k"] or call.heads % counts["n"]):
        raise _refuse(call, f"{call.heads} heads are cut elsewhere than their {call.kv_heads} key heads")


def _lay_out(call: AttentionCall, role: str, dims: str, axes: Mapping[str, tuple[str, ...]]) -> TensorSharding:
    """How a result lies by its dimensions; one of a bias that is repeated is whole."""
    repeated = [role == "dbias" and size == 1 for size in call.shape(role, result=True).dimensions]
    return TensorSharding(
        tuple(() if is_repeated else axes[letter] for letter, is_repeated in zip(dims, repeated, strict=True))
    )


def _refuse(call: AttentionCall, what: str) -> PlanError:
    return PlanError(f"attention cannot be computed in these parts: {what}", where=call.target)
