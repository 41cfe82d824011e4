"""The examples of Keras train as a user starts them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.examples.example_runs import output_of


def figures(output: str, name: str) -> list[float]:
    """Values of a metric, epoch by epoch."""
    return [float(value) for value in re.findall(rf" {name}: (\S+)", output)]


@pytest.mark.dear
def test_a_cnn_tells_digits_apart_and_is_saved(tmp_path: Path) -> None:
    import keras

    output = output_of("keras/cnn.py", f"--epochs 4 --devices 2 --save {tmp_path}/digits.keras")
    assert figures(output, "val_accuracy")[-1] > 0.8
    assert "digits/conv_0/kernel" in output
    assert keras.models.load_model(tmp_path / "digits.keras").name == "digits"


@pytest.mark.dear
def test_a_gpt_learns_text() -> None:
    losses = figures(output_of("keras/gpt.py", "--epochs 2 --steps 15 --devices 2 --layers 1"), "val_loss")
    assert losses[-1] < losses[0] < 0.7 * math.log(256)  # which no knowledge of the text gives
