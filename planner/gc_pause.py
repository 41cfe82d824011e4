"""Python's garbage collector held back while many objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection inside: it would walk a growing graph again and again and find nothing.

    What becomes garbage without cycles is freed all the same. What stays is old at the end: the next small collection
    does not walk it. May nest.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # all that is frozen then are these, and they go to the oldest generation
                gc.freeze()
                gc.unfreeze()
            gc.enable()
