"""Install a requirement into the running environment, one short line of progress at a time.

`pip` itself is either silent or long-winded; here a line says what it is doing now.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

_STEP = re.compile(r"^\s*(Collecting|Downloading|Building|Installing|Preparing|Obtaining)\s+(\S+)")


def main(requirement: str) -> int:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-e", requirement]
    started_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    shown_s = 0.0
    for line in process.stdout:
        lines.append(line)
        step = _STEP.match(line)
        now_s = time.monotonic() - started_s
        if step is None:
            continue
        if sys.stdout.isatty():
            print(f"\r\033[K  {now_s:4.0f} s  {step.group(1).lower()} {step.group(2)[:60]}", end="", flush=True)
        elif now_s - shown_s > 10:
            shown_s = now_s
            print(f"  {now_s:4.0f} s  {step.group(1).lower()} {step.group(2)[:60]}", flush=True)
    code = process.wait()
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if code:
        print("".join(lines[-40:]), file=sys.stderr)
        print("installation failed; pip's last lines stand above", file=sys.stderr)
    else:
        print(f"  installed in {time.monotonic() - started_s:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
