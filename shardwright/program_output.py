"""What a user's program prints: how nodes and hosts are discovered."""

from __future__ import annotations

import subprocess


class ProgramFailure(Exception):
    """A program that gave no output. is_started: whether it could be run at all."""

    def __init__(self, message: str, *, is_started: bool) -> None:
        super().__init__(message)
        self.is_started = is_started


def read_output(program: str, timeout_s: float) -> str:
    """The standard output of a program without arguments and input.

    Raises ProgramFailure: it cannot be run, takes longer, or ends with another exit code than 0.
    """
    try:
        ended = subprocess.run(
            [program], capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProgramFailure(f"cannot be run: {reason}", is_started=False) from None
    if ended.returncode:
        last = "".join(f": {line}" for line in ended.stderr.strip().splitlines()[-1:])
        raise ProgramFailure(f"ended with exit code {ended.returncode}{last}", is_started=True)
    return ended.stdout
