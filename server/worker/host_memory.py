"""Memory that this process may use: the machine's, or what its control group leaves of that (systemd, containers)."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def host_memory(cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> tuple[int, int]:
    """(bytes, those of them that are still available). Of control groups version 2, other limits are not seen."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for folder in _folders(cgroups, own_cgroup):
        try:
            limit = int((folder / "memory.max").read_text())  # "max": none
            used = int((folder / "memory.current").read_text()) - _reclaimable(folder)
        except (OSError, ValueError):
            continue
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _folders(cgroups: Path, own_cgroup: Path) -> list[Path]:
    """This process' control group and those around it."""
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    path = cgroups / own.lstrip("/")
    return [path, *path.parents[: len(path.relative_to(cgroups).parts)]]


def _reclaimable(folder: Path) -> int:
    """Cached files, which make room where memory is needed."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
