"""Every example trains through an embedded server, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TINY_GPT2 = "--steps 12 --layers 1 --width 32 --heads 2 --context 32 --learning-rate 1e-2 --explain"


def run(script: str, arguments: str) -> str:
    """Output of an example that ended well."""
    environment = {key: value for key, value in os.environ.items() if key not in ("SERVER_IP", "SERVER_PORT")}
    environment.pop("XLA_FLAGS", None)  # a user's shell has none
    command = [sys.executable, str(ROOT / "examples" / script), *arguments.split()]
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, env=environment)
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "fall"),
    [("mlp/train.py", "--steps 50", 0.7), ("cnn/train.py", "--steps 40", 0.7), ("gpt2/train.py", TINY_GPT2, 0.8)],
    ids=["mlp", "cnn", "gpt2"],
)
def test_example_learns_and_explains(script: str, arguments: str, fall: float) -> None:
    output = run(script, arguments)
    losses = [float(loss) for loss in re.findall(r"step .*loss (\S+)", output)]
    assert losses[-1] < fall * losses[0]
    assert "memory per device" in output
    assert "8 devices" in output
