"""Packed sequences while a step is traced: the padded tensor, of which the places that count are selected."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from shardwright.client.frontends.torch.checks import require
from shardwright.client.frontends.torch.selections import Selection


@contextlib.contextmanager
def keep_padded() -> Iterator[None]:
    """`pack_padded_sequence`, `pad_packed_sequence` and recurrent layers between them."""
    functions = SimpleNamespace(_pack_padded_sequence=_pack, _pad_packed_sequence=_pad)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(rnn, "_VF", functions))
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(mock.patch.object(kind, "forward", _forward(kind.forward)))
        yield


def _pack(padded: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    """(what counts of [time, sequence, …], how many sequences go on at each time)."""
    padded = padded.transpose(0, 1) if batch_first else padded
    require(
        (lengths > 0) & (lengths <= padded.shape[0]), "pack_padded_sequence: lengths are from 1 to that of the batch"
    )
    require(lengths[:-1] >= lengths[1:], "pack_padded_sequence: lengths are sorted, or enforce_sorted is False")
    mask = torch.arange(padded.shape[0])[:, None] < lengths
    return Selection.of(padded, mask), mask.sum(1)


def _pad(data: Any, batch_sizes: Any, batch_first: bool, padding: float, length: int) -> tuple[Any, Any]:
    values, mask = _unfold(data, batch_sizes)
    lengths = mask.sum(0)
    if sys._getframe(1).f_locals.get("total_length") is None:
        text = (
            "pad_packed_sequence: the longest sequence is as long as the batch, or total_length says how long that is"
        )
        require(lengths.max() == mask.shape[0], text)
    padded = torch.where(mask.reshape(*mask.shape, *[1] * (values.dim() - 2)), values, padding)
    longer = padded.new_full((length - padded.shape[0], *padded.shape[1:]), padding)
    padded = torch.cat([padded, longer])
    return (padded.transpose(0, 1) if batch_first else padded), lengths


def _unfold(data: Any, batch_sizes: Any) -> tuple[Any, Any]:
    """Values and mask of [time, sequence, …]."""
    count = batch_sizes.shape[0]
    return data.values.unflatten(0, (count, -1)), data.mask.unflatten(0, (count, -1))


def _forward(of_padded: Callable[..., Any]) -> Callable[..., Any]:
    def forward(module: Any, sequence: Any, hx: Any = None) -> Any:
        if not isinstance(sequence, rnn.PackedSequence):
            return of_padded(module, sequence, hx)
        values, mask = _unfold(sequence.data, sequence.batch_sizes)
        hx = _zeros(module, values) if hx is None else module.permute_hidden(hx, sequence.sorted_indices)
        states = hx if isinstance(hx, tuple) else (hx,)
        values, states = _run_layers(module, values, mask, states)
        last = states if isinstance(hx, tuple) else states[0]
        packed = rnn.PackedSequence(
            Selection.of(values, mask), sequence.batch_sizes, sequence.sorted_indices, sequence.unsorted_indices
        )
        return packed, module.permute_hidden(last, sequence.unsorted_indices)

    return forward


def _zeros(module: Any, values: Any) -> Any:
    count = module.num_layers * (1 + module.bidirectional)
    hidden = values.new_zeros(count, values.shape[1], module.proj_size or module.hidden_size)
    cells = values.new_zeros(count, values.shape[1], module.hidden_size)
    return (hidden, cells) if isinstance(module, nn.LSTM) else hidden


def _run_layers(module: Any, values: Any, mask: Any, states: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    directions = 1 + module.bidirectional
    last = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            output, state = _run(
                module, values, mask, tuple(state[number] for state in states), module.all_weights[number],
                backwards=direction == 1,
            )  # fmt: skip
            outputs.append(output)
            last.append(state)
        values = torch.cat(outputs, -1)
        if layer + 1 < module.num_layers and module.dropout:
            values = F.dropout(values, module.dropout, module.training)
    return values, tuple(torch.stack(parts) for parts in zip(*last, strict=True))


def _run(
    module: Any, values: Any, mask: Any, state: tuple[Any, ...], weights: Sequence[Any], *, backwards: bool
) -> tuple[Any, tuple[Any, ...]]:
    """One direction of one layer: a sequence that has ended, or not begun backwards, stays as it is."""
    of_input, of_state, *others = weights
    biases = others[:2] if module.bias else (None, None)
    times = range(values.shape[0])
    outputs: dict[int, Any] = {}
    for time in reversed(times) if backwards else times:
        new = _advance(module, values[time], state, (of_input, of_state, *biases))
        if module.proj_size:
            new = (F.linear(new[0], weights[-1]), *new[1:])
        state = tuple(torch.where(mask[time, :, None], a, b) for a, b in zip(new, state, strict=True))
        outputs[time] = state[0]
    return torch.stack([outputs[time] for time in times]), state


def _advance(module: Any, value: Any, state: tuple[Any, ...], weights: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(module, nn.LSTM):
        return tuple(torch.lstm_cell(value, state, *weights))
    cell = {"GRU": torch.gru_cell, "RNN_TANH": torch.rnn_tanh_cell, "RNN_RELU": torch.rnn_relu_cell}[module.mode]
    return (cell(value, state[0], *weights),)
