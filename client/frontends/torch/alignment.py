"""`torch.nn.functional.ctc_loss` as an operator of ours, whose shapes do not depend on lengths."""

from __future__ import annotations

from typing import Any

import torch

_LIBRARY = torch.library.Library("shardwright", "DEF")
_LIBRARY.define("ctc_loss(Tensor scores, Tensor targets, Tensor lengths, Tensor target_lengths, int blank) -> Tensor")
_LIBRARY.define("ctc_slope(Tensor scores, Tensor targets, Tensor lengths, Tensor target_lengths, int blank) -> Tensor")


def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """As `torch.nn.functional.ctc_loss`. Targets may be longer than the longest, or one after the other."""
    is_single = log_probs.dim() == 2
    scores = log_probs.unsqueeze(1) if is_single else log_probs
    lengths, of_targets = (torch.as_tensor(value).reshape(-1) for value in (input_lengths, target_lengths))
    losses = _Loss.apply(scores, _in_rows(targets, of_targets, scores), lengths, of_targets, blank)
    if zero_infinity:
        losses = torch.where(losses.isinf(), 0.0, losses)
    if reduction == "mean":
        return (losses / of_targets.clamp(min=1)).mean()
    losses = losses.sum() if reduction == "sum" else losses
    return losses.reshape(()) if is_single else losses


def _in_rows(targets: Any, lengths: Any, scores: Any) -> Any:
    """Targets one after the other, in a row for each; what a row has no place for has no alignment either."""
    if targets.dim() == 2:
        return targets
    longest = min(targets.numel(), scores.shape[0] + 1)
    starts = lengths.cumsum(0) - lengths
    places = starts[:, None] + torch.arange(longest)
    return targets[places.clamp(max=targets.numel() - 1)]


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, ctx.blank = arguments
        ctx.save_for_backward(*tensors)
        return torch.ops.shardwright.ctc_loss(*arguments)

    @staticmethod
    def backward(ctx: Any, slope: Any) -> Any:
        of_scores = torch.ops.shardwright.ctc_slope(*ctx.saved_tensors, ctx.blank)
        of_each = slope[None, :, None]
        return torch.where(of_each == 0, 0.0, of_scores * of_each), None, None, None, None


def _type_of_loss(scores: Any, *_: Any) -> Any:
    return scores.new_empty(scores.shape[1])


def _type_of_slope(scores: Any, *_: Any) -> Any:
    return torch.empty_like(scores)


_LIBRARY.impl("ctc_loss", _type_of_loss, "Meta")
_LIBRARY.impl("ctc_slope", _type_of_slope, "Meta")
