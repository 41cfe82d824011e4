"""Python's garbage collector paused during the construction of many long-lived objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection inside: it would walk a growing graph again and again and find nothing.

    Garbage without cycles is freed all the same. Survivors are old at the end: the next small collection does not walk
    them. May nest.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # only these are frozen; they go to the oldest generation
                gc.freeze()
                gc.unfreeze()
            gc.enable()
