"""A process's place in a step of Slurm (25.05, `srun`, "Output environment variables")."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.clusters.cluster import join_address
from shardwright.errors import OptionError
from shardwright.ranks.places import JOB_PORTS, Place, read_number
from shardwright.ranks.tuning import MAX_HOSTS

#: Steps of Slurm's own have numbers from here on: the script of `sbatch`, the shell of `salloc`.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_log = logging.getLogger("shardwright.ranks")


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place of a task that `srun` started; alone in a script of `sbatch` or a shell of `salloc`. None elsewhere.

    The variables of an allocation reach every process in it, those of a step its tasks alone: only those count. Raises
    OptionError.
    """
    if not environment.get("SLURM_PROCID"):
        return None
    rank = read_number(environment, "SLURM_PROCID")
    if not _is_step(environment):
        return _alone(environment, rank)
    name = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = read_number(environment, name, 1)
    if rank >= size:
        raise OptionError(f"{rank} is not below {name}={size}", where="SLURM_PROCID", remedy="srun sets both")
    if size == 1:
        return Place()
    lists = (environment.get(name) for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    hosts = expand_hosts(next(filter(None, lists), ""))
    step = _step_number(environment)
    job = read_number(environment, "SLURM_JOB_ID", 0)
    port = read_number(environment, "JAX_COORDINATOR_PORT", JOB_PORTS[(job + 1021 * step) % len(JOB_PORTS)])
    return _with_neighbors(
        Place(
            coordinator=join_address(hosts[0] if len(hosts) > 1 else "127.0.0.1", port) if hosts else "",
            size=size,
            rank=rank,
            job=f"Slurm {job}.{step}",
            has_neighbors=False,
        ),
        environment,
        len(hosts),
    )


def _is_step(environment: Mapping[str, str]) -> bool:
    """Whether `srun` started this process, as far as variables tell."""
    of_step = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    return any(environment.get(name) for name in of_step) and _step_number(environment) < _FIRST_SPECIAL_STEP


def _step_number(environment: Mapping[str, str]) -> int:
    name = "SLURM_STEP_ID" if environment.get("SLURM_STEP_ID") else "SLURM_STEPID"
    return read_number(environment, name, 0)


def _alone(environment: Mapping[str, str], rank: int) -> Place:
    """A process of the allocation that is no task."""
    size = read_number(environment, "SLURM_NTASKS", 1)
    if rank > 0:
        raise OptionError(
            f"SLURM_PROCID={rank}: this is one of {max(size, rank + 1)} tasks, but no SLURM_STEP_NODELIST says where "
            "the first one is",
            where="SLURM_STEP_NODELIST",
            remedy="start the tasks with srun, which sets it, or give all of them SHARDWRIGHT_RANK, SHARDWRIGHT_SIZE "
            "and SHARDWRIGHT_COORDINATOR",
        )
    if size > 1:
        _log.warning(
            "SLURM_NTASKS=%d, but srun has not started this process: it is a job of one rank; start it with "
            "`srun python …` for %d",
            size,
            size,
        )
    return Place()


def _with_neighbors(place: Place, environment: Mapping[str, str], host_count: int) -> Place:
    """The place with its neighbors, where the variables tell them."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    counts = expand_counts(text)
    if sum(counts) != place.size:
        nodes = read_number(environment, "SLURM_STEP_NUM_NODES", host_count)
        if not nodes or place.size % nodes:
            return place
        counts = [place.size // nodes] * nodes
    node = read_number(environment, "SLURM_NODEID", place.rank // counts[0] if len(set(counts)) == 1 else len(counts))
    local_rank = read_number(environment, "SLURM_LOCALID", place.size)
    if node >= len(counts) or local_rank >= counts[node]:
        return place
    holders = [index for index, count in enumerate(counts) if count > local_rank]
    return replace(
        place,
        local_rank=local_rank,
        local_size=counts[node],
        cross_rank=holders.index(node),
        cross_size=len(holders),
        has_neighbors=True,
    )


def expand_counts(text: str) -> list[int]:
    """Tasks of each node: `2(x3),1` is 2, 2, 2, 1; nothing for what is no such list."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d{1,7})\))?\s*", item)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Hosts of a list: `a[1-2,07]x,b` is a1x, a2x, a07x, b. Raises OptionError for what is no list."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text.strip()):
        parts = [list(_expand_range(part)) for part in re.split(r"(\[[^\]]*\])", item) if part]
        hosts += itertools.islice(map("".join, itertools.product(*parts)), MAX_HOSTS)
    return hosts


def _expand_range(part: str) -> Iterator[str]:
    """The texts of `[1-3,07]`; of anything else that itself."""
    if not part.startswith("["):
        yield part
        return
    for item in part[1:-1].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            remedy = "Slurm sets it: node[1-4,7]"
            raise OptionError(f"{item!r} is no range of hosts", where="SLURM_STEP_NODELIST", remedy=remedy)
        first, last = int(match[1]), int(match[2] or match[1])
        for number in range(first, min(last, first + MAX_HOSTS) + 1):
            yield f"{number:0{len(match[1])}d}"
