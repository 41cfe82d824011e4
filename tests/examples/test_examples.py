"""Every example trains through an embedded server as a user starts it, and as plain JAX on one device does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from examples.common import digits, text
from examples.gpt2 import model as gpt2
from examples.gpt2.train import adamw
from examples.llama import model as llama
from examples.moe import model as moe
from examples.wide_resnet import model as wide_resnet
from tests.examples.example_runs import losses_in, output_of, run

STEPS = 6
#: One program: whether a pipeline would be faster, or parts of a batch, is not searched.
ONE_PROGRAM = "--stages 1 --micro-batches 1"


def losses_on_one_device(model: Any, optimizer: optax.GradientTransformation, data: Iterator[Any]) -> list[float]:
    """Losses of `STEPS` steps of the tiny preset, by jax.jit."""
    init, train_step, _ = model.make_steps(model.PRESETS["tiny"], optimizer)
    step, state, losses = jax.jit(train_step), jax.jit(init)(jax.random.key(0)), []
    for batch in islice(data, STEPS):
        *state, loss = step(*state, *batch)
        losses.append(float(loss))
    return losses


def texts() -> Iterator[Any]:
    training, _ = text.split(text.standard_library_text())
    return text.batches(training, 16, 32)


def images() -> Iterator[Any]:
    training, _ = digits.digits()
    return digits.batches(*training, 64, (8, 8, 1))


@pytest.mark.dear
@pytest.mark.parametrize(
    ("example", "model", "optimizer", "data", "options"),
    [
        (
            "gpt2", gpt2, adamw(1e-2, STEPS), texts,
            f"--mesh 2x4 --force mixed {ONE_PROGRAM} --explain --trace {{}}/trace.json",
        ),
        ("llama", llama, optax.adamw(1e-2), texts, f"--devices 4 --mesh 2x2 {ONE_PROGRAM}"),
        ("moe", moe, optax.adamw(1e-2), texts, f"--devices 4 --mesh 2x2 {ONE_PROGRAM} --annotate"),
        (
            "wide_resnet", wide_resnet, optax.adam(1e-2), images,
            "--devices 2 --stages 2 --micro-batches 2 --schedule 1f1b",
        ),
    ],
    ids=["gpt2", "llama", "moe", "wide_resnet"],
)  # fmt: skip
def test_a_tiny_model_trains_as_on_one_device(
    example: str, model: Any, optimizer: optax.GradientTransformation, data: Any, options: str, tmp_path: Path
) -> None:
    options = options.format(tmp_path)
    output = output_of(f"{example}/train.py", f"--preset tiny --steps {STEPS} --learning-rate 1e-2 {options}")
    expected = losses_on_one_device(model, optimizer, data())
    assert expected[-1] < 0.99 * expected[0]
    assert losses_in(output) == pytest.approx([expected[0], expected[-1]], abs=2e-3)
    if "--explain" in options:
        assert "memory per device" in output
        assert "8 devices" in output
        assert "measured" in (tmp_path / "trace.json").read_text()


@pytest.mark.dear
def test_a_run_goes_on_from_its_checkpoint_under_another_plan(tmp_path: Path) -> None:
    options = f"--preset tiny --layers 1 --steps 6 --learning-rate 1e-2 {ONE_PROGRAM}"
    options += f" --checkpoint-dir {tmp_path} --checkpoint-every 4"
    whole = losses_in(output_of("gpt2/train.py", f"{options} --devices 2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6"]
    shutil.rmtree(tmp_path / "6")  # as a run that was interrupted leaves it
    rest = output_of("gpt2/train.py", f"{options} --resume --devices 3")
    assert "step    5/6" in rest
    assert losses_in(rest)[-1] == pytest.approx(whole[-1], abs=2e-3)
    assert "nothing was left to train" in output_of("gpt2/train.py", f"{options} --resume --devices 1")
    assert "--resume needs --checkpoint-dir" in run("gpt2/train.py", "--resume").stderr


@pytest.mark.dear
@pytest.mark.parametrize(
    ("script", "arguments"),
    [("mlp/train.py", "--steps 50"), ("cnn/train.py", "--steps 20"), ("ring_attention/train.py", "--steps 20")],
)
def test_an_example_learns_and_explains(script: str, arguments: str) -> None:
    output = output_of(script, arguments)
    losses = losses_in(output)
    assert losses[-1] < 0.7 * losses[0]
    assert "memory per device" in output
