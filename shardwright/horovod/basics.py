"""The job, by Horovod's names: joining it, leaving it, what it is built on, and the timeline."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright import ranks
from shardwright.errors import OptionError
from shardwright.horovod import process_sets as sets
from shardwright.horovod.errors import OptionValueError

_NO_MPI = "ranks need no MPI: start them with shardwright run, srun, mpirun or torchrun, and name ranks by number"


def init(comm: Any = None, process_sets: Any = None, **options: Any) -> None:
    """Join the job; twice is once. Its options are those of `sw.ranks.init`.

    comm: None, or the numbers of all ranks. process_sets: sets to number; "dynamic" says that others may follow,
    which is always so. Raises OptionError, for a communicator of MPI too.
    """
    was_in = ranks.is_initialized()
    ranks.init(**options)
    if not was_in:
        sets.forget_process_sets()
    if comm is not None and list(comm if isinstance(comm, Sequence) else ()) != list(range(ranks.size())):
        raise OptionValueError(f"{comm!r} is not all ranks of the job", where="comm", remedy=_NO_MPI)
    if process_sets is None or process_sets == "dynamic":
        return
    if isinstance(process_sets, str) or not isinstance(process_sets, Sequence):
        raise OptionValueError(f"{process_sets!r}", where="process_sets", remedy="a list of ProcessSet, or 'dynamic'")
    for process_set in process_sets:
        sets.add_process_set(process_set)


def shutdown() -> None:
    """Leave the job, once all ranks do; numbers of process sets end with it."""
    ranks.shutdown()
    sets.forget_process_sets()


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len(set(ranks.allgather_object(ranks.local_size()))) == 1


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Record the collectives of all ranks; every rank calls it. mark_cycles: not used, there are no cycles."""
    ranks.start_timeline(file_path)


# ---- what it is built on ----------------------------------------------------------
def gloo_built() -> bool:
    """True: XLA carries Gloo, for CPUs."""
    return True


def gloo_enabled() -> bool:
    """Whether this process computes on CPUs: collectives there are Gloo's."""
    return _backend() == "cpu"


def nccl_built() -> int:
    """The version of NCCL where this process computes on CUDA GPUs, as NCCL counts (22703 is 2.27.3); else 0.

    1 where the version cannot be read.
    """
    if _backend() != "gpu" or rocm_built():
        return 0
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            major, minor, patch = (int(part) for part in importlib.metadata.version(package).split(".")[:3])
            return 10000 * major + 100 * minor + patch
    return 1


def cuda_built() -> bool:
    """Whether this process computes on CUDA GPUs."""
    return _backend() == "gpu" and not rocm_built()


def rocm_built() -> bool:
    """Whether this process computes on GPUs of AMD."""
    import jax

    return _backend() == "gpu" and "rocm" in jax.devices()[0].client.platform_version.lower()


def _backend() -> str:
    import jax

    return jax.default_backend()


def mpi_built() -> bool:
    """False: ranks need no MPI."""
    return False


def mpi_enabled() -> bool:
    """False: ranks need no MPI."""
    return False


def mpi_threads_supported() -> bool:
    """False: ranks need no MPI."""
    return False


def ddl_built() -> bool:
    """False: collectives are XLA's."""
    return False


def ccl_built() -> bool:
    """False: collectives are XLA's."""
    return False


# ---- starting ranks from Python ---------------------------------------------------
#: Arguments of `horovod.run` that say how its own machinery works; ours needs none of them.
_WITHOUT_EFFECT = (
    "disable_cache", "use_gloo", "verbose", "start_timeout", "network_interfaces", "network_interface", "executable",
    "prefix_output_with_timestamp",
)  # fmt: skip


def run(
    func: Any,
    args: Sequence[Any] = (),
    kwargs: Any = None,
    np: int = 1,
    hosts: str | None = None,
    *,
    num_proc: int | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Run `func(*args, **kwargs)` as `np` ranks of this machine; the results in rank order.

    num_proc: the same as np. hosts: this machine's own, `localhost:4`. Raises OptionError for other hosts, and for
    options that would start ranks elsewhere: that is `shardwright run`.
    """
    from shardwright.launch.hosts import is_this_machine, parse_hosts

    named = () if hosts is None else parse_hosts(hosts, "hosts")
    elsewhere = [host.name for host in named if not is_this_machine(host.name)]
    refused = [name for name, value in options.items() if name not in _WITHOUT_EFFECT and value is not None]
    if elsewhere or refused:
        raise OptionError(
            f"{elsewhere[0]!r} is another machine" if elsewhere else f"{refused[0]}={options[refused[0]]!r}",
            where="hosts" if elsewhere else refused[0],
            remedy="start a script on several machines with shardwright run -H host1:4,host2:4",
        )
    return ranks.run(func, args, kwargs, np=np if num_proc is None else num_proc, env=env)
