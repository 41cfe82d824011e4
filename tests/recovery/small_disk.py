"""A disk that is soon full, where this process may mount one (Linux)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own in a folder of `folder`, or only that folder: `Path.is_mount` tells."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(disk)]
    has_mount = shutil.which("mount") is not None
    is_mounted = has_mount and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield disk
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextmanager
def full_disk(disk: Path) -> Iterator[None]:
    """All that is left of it is taken meanwhile."""
    filling = disk / "filling"
    with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(os.statvfs(disk).f_frsize))
    try:
        yield
    finally:
        filling.unlink()
