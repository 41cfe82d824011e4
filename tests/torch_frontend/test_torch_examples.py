"""The examples of PyTorch train as a user starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.examples.example_runs import losses_in, output_of


@pytest.mark.dear
def test_a_gpt_learns_text_and_its_state_is_plain_pytorchs(tmp_path: Path) -> None:
    from examples.torch.nanogpt import GPT, make_optimizer

    output = output_of("torch/nanogpt.py", f"--steps 40 --devices 2 --layers 1 --save {tmp_path}/state.pt")
    losses = losses_in(output)
    assert losses[-1] < 0.8 * losses[0]
    model = GPT(context=64, width=64, heads=4, layers=1, dropout=0.1)
    state = torch.load(tmp_path / "state.pt")
    model.load_state_dict(state["model"])
    make_optimizer(model, 2e-3).load_state_dict(state["optimizer"])


@pytest.mark.dear
@pytest.mark.parametrize("model", ["llama", "gpt2", "mistral"])
def test_a_model_of_a_configuration_learns_text(model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = tmp_path / "weights.safetensors"
    losses = losses_in(output_of("torch/hugging_face.py", f"--steps 25 --devices 2 --model {model} --export {weights}"))
    assert losses[-1] < 0.9 * losses[0]
    assert all(tensor.isfinite().all() for tensor in load_file(weights).values())


@pytest.mark.dear
def test_a_resnet_tells_digits_apart() -> None:
    output = output_of("torch/resnet.py", "--devices 2 --width 8")
    (accuracy,) = re.findall(r"accuracy on held-out images: (\S+)", output)
    assert float(accuracy) > 0.8
