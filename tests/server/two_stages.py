"""A training step cut into two stages by hand: a hidden layer on one mesh, the loss on another.

What the planner makes of a program is tried elsewhere; here it is the runtime that counts, so the pieces are plain
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.tasks import MICRO_BATCH, ProgramSpec, Schedule, StepSpec, StepValue, TaskGraph, task_graph

ROWS, WIDTH, HIDDEN = 16, 8, 12
RATE = 0.1

#: Stage → (first device, mesh). The stages lie differently, so that whatever goes between them has to be cut anew.
STAGES = ((0, Mesh.of({"x": 4})), (4, Mesh.of({"x": 2, "y": 2})))

Arrays = dict[str, np.ndarray]


def inputs() -> Arrays:
    rng = np.random.default_rng(0)
    shapes = {"w0": (WIDTH, HIDDEN), "w1": (HIDDEN,), "x": (ROWS, WIDTH), "y": (ROWS,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def reference(arrays: Arrays) -> Arrays:
    """One step on the whole batch in JAX, on one device."""

    def loss_of(w0: jax.Array, w1: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(arrays["x"] @ w0) @ w1 - arrays["y"]) ** 2)

    loss, (g0, g1) = jax.value_and_grad(loss_of, (0, 1))(arrays["w0"], arrays["w1"])
    return {"w0": arrays["w0"] - RATE * g0, "w1": arrays["w1"] - RATE * g1, "loss": loss}


# ---- the pieces --------------------------------------------------------------
def _start_0() -> tuple[jax.Array, ...]:
    return (jnp.zeros((WIDTH, HIDDEN), jnp.float32),)


def _start_1() -> tuple[jax.Array, ...]:
    return jnp.zeros((HIDDEN,), jnp.float32), jnp.zeros((), jnp.float32)


def _split(batch: jax.Array, number: jax.Array) -> tuple[jax.Array, ...]:
    return (jax.lax.dynamic_index_in_dim(batch, number, keepdims=False),)


def _forward_0(x: jax.Array, w0: jax.Array) -> tuple[jax.Array, ...]:
    return (jnp.tanh(x @ w0),)


def _backward_1(h: jax.Array, y: jax.Array, w1: jax.Array, g1: jax.Array, loss: jax.Array) -> tuple[jax.Array, ...]:
    error = h @ w1 - y
    d = 2 / ROWS * error
    return d[:, None] * w1, g1 + h.T @ d, loss + jnp.sum(error**2) / ROWS


def _backward_0(dh: jax.Array, h: jax.Array, x: jax.Array, g0: jax.Array) -> tuple[jax.Array, ...]:
    return (g0 + x.T @ (dh * (1 - h**2)),)


def _apply(w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    return (w - RATE * g,)


@dataclass(frozen=True, kw_only=True)
class HandPiece:
    """A piece and the function that it computes."""

    piece: ProgramSpec
    function: Callable[..., tuple[jax.Array, ...]]


def _piece(name: str, function: Callable[..., Any], reads: str, writes: str, donates: str = "") -> HandPiece:
    kind, number = name.split(".")
    chunk = int(number) if kind in ("forward", "backward") else None
    return HandPiece(
        function=function,
        piece=ProgramSpec(
            program=name, kind=kind, stage=int(number), chunk=chunk, reads=tuple(reads.split()),
            writes=tuple(writes.split()), donates=tuple(donates.split()), time_s=1e-3,
        ),
    )  # fmt: skip


PIECES = (
    _piece("start.0", _start_0, "", "g0"),
    _piece("start.1", _start_1, "", "g1 loss"),
    _piece("split.0", _split, f"x {MICRO_BATCH}", "x_part"),
    _piece("split.1", _split, f"y {MICRO_BATCH}", "y_part"),
    _piece("forward.0", _forward_0, "x_part w0", "h"),
    _piece("backward.1", _backward_1, "h y_part w1 g1 loss", "dh g1 loss", "g1 loss"),
    _piece("backward.0", _backward_0, "dh h x_part g0", "g0", "g0"),
    _piece("apply.0", _apply, "w0 g0", "w0_new", "w0"),
    _piece("apply.1", _apply, "w1 g1", "w1_new", "w1"),
)
ARGUMENTS = (("w0", 0), ("w1", 1), ("x", 0), ("y", 1))
OUTPUTS = (("w0_new", 0), ("w1_new", 1), ("loss", 1))


def layouts(micro_batches: int) -> dict[tuple[str, int], Layout]:
    """How every value lies on every stage that has it."""
    rows = ROWS // micro_batches
    f32: Mapping[tuple[str, int], tuple[tuple[int, ...], str]] = {
        ("w0", 0): ((WIDTH, HIDDEN), "- x"),
        ("w0_new", 0): ((WIDTH, HIDDEN), "- x"),
        ("g0", 0): ((WIDTH, HIDDEN), "- x"),
        ("x", 0): ((micro_batches, rows, WIDTH), "- - -"),
        ("x_part", 0): ((rows, WIDTH), "- -"),
        ("h", 0): ((rows, HIDDEN), "- x"),
        ("dh", 0): ((rows, HIDDEN), "- x"),
        ("h", 1): ((rows, HIDDEN), "x y"),
        ("dh", 1): ((rows, HIDDEN), "y x"),
        ("w1", 1): ((HIDDEN,), "y"),
        ("w1_new", 1): ((HIDDEN,), "y"),
        ("g1", 1): ((HIDDEN,), "y"),
        ("y", 1): ((micro_batches, rows), "- x"),
        ("y_part", 1): ((rows,), "x"),
        ("loss", 1): ((), ""),
    }
    entries = {key: _layout("f32", *value, STAGES[key[1]]) for key, value in f32.items()}
    return entries | {(MICRO_BATCH, stage): _layout("s32", (), "", STAGES[stage]) for stage in (0, 1)}


def _layout(element_type: str, shape: tuple[int, ...], axes: str, stage: tuple[int, Mesh]) -> Layout:
    first_device, mesh = stage
    dims = tuple((axis,) if axis != "-" else () for axis in axes.split())
    stored = tuple(-(-size // mesh.size(dim)) * mesh.size(dim) for size, dim in zip(shape, dims, strict=True))
    return Layout(
        element_type=element_type, shape=shape, mesh=mesh, sharding=TensorSharding(dims), stored_shape=stored,
        first_device=first_device,
    )  # fmt: skip


def graph(micro_batches: int, schedule: str) -> TaskGraph:
    micro = {"x_part", "y_part", "h", "dh"}
    lying = layouts(micro_batches)
    names = dict.fromkeys(name for name, _ in lying if name != MICRO_BATCH)
    values = tuple(
        StepValue(
            name=name,
            scope="micro_batch" if name in micro else "step",
            sizes={stage: lying[name, stage].shard_bytes for stage in (0, 1) if (name, stage) in lying},
        )
        for name in names
    )
    pieces = StepSpec(
        micro_batches=micro_batches, stage_of_chunk=(0, 1), values=values,
        programs=tuple(each.piece for each in PIECES), arguments=ARGUMENTS, outputs=OUTPUTS,
    )  # fmt: skip
    return task_graph(pieces, Schedule.parse(schedule))


def stored_inputs(arrays: Arrays, micro_batches: int) -> Arrays:
    """The arguments as the step takes them: the batch in micro-batches."""
    rows = ROWS // micro_batches
    return {
        **arrays,
        "x": arrays["x"].reshape(micro_batches, rows, WIDTH),
        "y": arrays["y"].reshape(micro_batches, rows),
    }


def lower_text(hand_piece: HandPiece, micro_batches: int) -> str:
    """HLO text of a piece."""
    lying = layouts(micro_batches)
    shapes = [
        jax.ShapeDtypeStruct(lying[name, hand_piece.piece.stage].shape, lying[name, hand_piece.piece.stage].dtype)
        for name in hand_piece.piece.reads
    ]
    donated = tuple(hand_piece.piece.reads.index(name) for name in hand_piece.piece.donates)
    return jax.jit(hand_piece.function, keep_unused=True, donate_argnums=donated).lower(*shapes).as_text("hlo")
