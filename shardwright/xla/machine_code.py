"""Which machines run the same machine code."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

#: Lines of /proc/cpuinfo that XLA's compiler for CPUs goes by, on x86 and on ARM.
_DECISIVE = (
    "vendor_id",
    "cpu family",
    "model",
    "flags",
    "CPU implementer",
    "CPU architecture",
    "CPU part",
    "Features",
)


@cache
def machine_code_target() -> str:
    """What programs for CPUs are compiled for here: machines of the same target run each other's.

    Machines that do not say what they are made of share it with no other.
    """
    try:
        first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.node()
    lines = [line.partition(":") for line in first_core.splitlines()]
    facts = {name.strip(): " ".join(sorted(value.split())) for name, _, value in lines}
    known = "\n".join(f"{name}: {facts[name]}" for name in _DECISIVE if name in facts)
    return f"{platform.machine()} {hashlib.sha256(known.encode()).hexdigest()[:16]}"
