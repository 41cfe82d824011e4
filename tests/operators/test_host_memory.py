"""Memory of a node: the machine's, or the control group's around its daemon."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from shardwright.server.worker.host_memory import host_memory

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path: Path) -> tuple[Path, Path]:
    """(folder of control groups, file that names the process' own)."""
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/server\n")
    (tmp_path / "fs" / "pod" / "server").mkdir(parents=True)
    return tmp_path / "fs", own


def limit(folder: Path, most: str, used_mib: int, cached_mib: int = 0) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached_mib * MIB}\n")


def test_without_a_limit_it_is_the_machines(groups: tuple[Path, Path]) -> None:
    limit(groups[0] / "pod", "max", 10)
    total, available = host_memory(*groups)
    assert total == psutil.virtual_memory().total
    assert 0 < available <= total
    assert host_memory(groups[0], Path("/no/such/file"))[0] == total


def test_a_limit_counts_wherever_it_stands(groups: tuple[Path, Path]) -> None:
    limit(groups[0] / "pod", str(100 * MIB), 60, cached_mib=20)
    limit(groups[0] / "pod" / "server", "max", 50)
    assert host_memory(*groups) == (100 * MIB, 60 * MIB)
    limit(groups[0] / "pod" / "server", str(80 * MIB), 79)
    assert host_memory(*groups) == (80 * MIB, 1 * MIB)
