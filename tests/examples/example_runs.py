"""Runs examples as a user starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.light_compilation import LIGHT_COMPILATION

ROOT = Path(__file__).resolve().parent.parent.parent


def run(script: str, arguments: str = "") -> subprocess.CompletedProcess[str]:
    """An example that has ended."""
    environment = {key: value for key, value in os.environ.items() if key not in ("SERVER_IP", "SERVER_PORT")}
    environment["XLA_FLAGS"] = LIGHT_COMPILATION  # else as a user's shell: no number of devices
    command = [sys.executable, str(ROOT / "examples" / script), *arguments.split()]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=480, env=environment)


def output_of(script: str, arguments: str = "") -> str:
    """What an example that ended well printed."""
    child = run(script, arguments)
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step .*loss (\S+)", output)]
