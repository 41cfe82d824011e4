"""The folder of what may be kept between runs: plans, measurements."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

#: Environment variable: a folder to keep entries in, or `off`.
CACHE_VARIABLE = "SHARDWRIGHT_CACHE"


def cache_folder(name: str) -> Path | None:
    """The user's folder of one kind of entry: under `$SHARDWRIGHT_CACHE`, or else under the platform's cache folder.

    None: the variable is `off`, or there is no home folder. It may not exist yet.
    """
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen == "off":
        return None
    try:
        root = Path(chosen) if chosen else user_cache_path("shardwright")
    except RuntimeError:  # no home folder
        return None
    return root / name
