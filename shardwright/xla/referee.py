"""XLA's own opinion of a program, asked in a child: its reader ends the process on some texts.

`python -m shardwright.xla.referee` reads HLO text from stdin and prints what XLA has against it, or nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys

from shardwright.errors import ShardwrightError
from shardwright.xla.tuning import REFEREE_TIMEOUT_S

#: Exit code of the child where XLA refuses the program.
_REFUSED = 3


def refusal_of(hlo_text: str, *, timeout_s: float = REFEREE_TIMEOUT_S) -> str | None:
    """XLA's objection to a program text; None if it is valid, or if XLA does not answer in time."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "shardwright.xla.referee"],
            input=hlo_text.encode(),
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if child.returncode == 0:
        return None
    if child.returncode == _REFUSED:
        return child.stdout.decode(errors="replace").strip()
    return "XLA's reader ends its process on it"


def main() -> int:
    from shardwright.xla.private import mlir_context, parse_hlo, parse_module, stablehlo_of, verify

    text = sys.stdin.buffer.read().decode()
    try:
        parse_hlo(text)
        with mlir_context():
            verify(parse_module(stablehlo_of(text)))
    except ShardwrightError as error:
        print(error.message)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
