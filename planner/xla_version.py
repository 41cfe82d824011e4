"""The version of XLA that compiles the plans: what it computes wrongly differs between releases."""

from __future__ import annotations

import functools
import re
from importlib.metadata import version


@functools.cache
def xla_version() -> tuple[int, ...]:
    """jaxlib's release, such as (0, 10, 2): XLA has no numbers of its own."""
    return tuple(map(int, re.findall(r"[0-9]+", version("jaxlib"))[:3]))
