"""A process's place in its job, from the variables of whichever launcher started it.

Nearest first: a launcher within another one's job has started this process, and its variables count. A launcher that
says "one process" makes a job of one. One that says more, but not where rank 0 is, is refused by name, never taken for
a job of one: every process would be rank 0. docs/run.md has the table.

Names are those of the launchers' manuals: `mpirun` of Open MPI 4 and 5, `torchrun` of PyTorch 2, Hydra of MPICH and
Intel MPI, MVAPICH2, PALS, `flux run`, `jsrun`, `horovodrun`. Hosts as in `jax._src.clusters` of JAX 0.10.2, where that
has any.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwright.clusters.cluster import join_address
from shardwright.errors import OptionError
from shardwright.ranks import launchers_cloud, slurm
from shardwright.ranks.places import JOB_PORTS, Place, check_address, read_number, read_place

_Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The names of a launcher's variables.

    nodes: of the number of hosts. jobs: those that name the job, the first one that is set. find_coordinator: where
    rank 0 listens, for ranks of several hosts; "" where nothing says so.
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    cross_rank: str = ""
    cross_size: str = ""
    nodes: str = ""
    jobs: tuple[str, ...] = ()
    find_coordinator: Callable[[_Environment], str] = lambda environment: ""


def find_place(environment: _Environment) -> Place:
    """The place of this process: alone, where no launcher's variables say otherwise.

    Raises OptionError, naming the variable, where they make no sense, or a job of several cannot be formed.
    """
    if environment.get("SHARDWRIGHT_SIZE") or environment.get("SHARDWRIGHT_RANK"):
        return read_place(_complete(environment))
    for launcher in LAUNCHERS:
        if environment.get(launcher.rank) and environment.get(launcher.size):
            return _place_by(launcher, environment)
    for find in (slurm.find_place, launchers_cloud.find_tpu_place, launchers_cloud.find_kubernetes_place):
        if place := find(environment):
            return _with_coordinator(place, environment)
    if environment.get("WORLD_SIZE", "1").strip() not in ("", "1"):
        raise _refusal("WORLD_SIZE", environment["WORLD_SIZE"], "no RANK says which this is")
    return Place()


def _complete(environment: _Environment) -> _Environment:
    """Our own variables, and of those that are missing what the launcher or JAX's variables say."""
    values = dict(environment)
    index, coordinator = environment.get("JOB_COMPLETION_INDEX"), _named_coordinator(environment)
    if index and "SHARDWRIGHT_RANK" not in values:
        values["SHARDWRIGHT_RANK"] = index
        coordinator = coordinator or launchers_cloud.first_pod(environment)
    if coordinator and "SHARDWRIGHT_COORDINATOR" not in values:
        values["SHARDWRIGHT_COORDINATOR"] = coordinator
    return values


# ---- launchers with variables for everything --------------------------------------
def _place_by(launcher: Launcher, environment: _Environment) -> Place:
    rank, size = (read_number(environment, name) for name in (launcher.rank, launcher.size))
    if rank >= size:
        raise OptionError(
            f"{rank} is not below {launcher.size}={size}",
            where=launcher.rank,
            remedy=f"see how {launcher.name} started this",
        )
    if size == 1:
        return Place()
    local_rank, local_size, cross_rank, cross_size = (
        read_number(environment, name) if name and environment.get(name) else None
        for name in (launcher.local_rank, launcher.local_size, launcher.cross_rank, launcher.cross_size)
    )
    if launcher.nodes and environment.get(launcher.nodes) == "1":
        local_size = size
    job = next((environment[name] for name in launcher.jobs if environment.get(name)), "")
    place = Place(
        size=size,
        rank=rank,
        local_rank=rank if local_rank is None else local_rank,
        local_size=size if local_size is None else local_size,
        job=f"{launcher.name} {job}".strip(),
        has_local=local_rank is not None and local_size is not None,
        has_neighbors=False,
    )
    if place.has_local and cross_rank is not None and cross_size is not None:
        place = replace(place, cross_rank=cross_rank, cross_size=cross_size, has_neighbors=True)
    if coordinator := _named_coordinator(environment):
        return replace(place, coordinator=coordinator)
    outer = slurm.find_place(environment)
    if outer is not None and (outer.rank, outer.size) == (rank, size):
        return outer  # Slurm's own PMI
    if job and local_size == size:
        return replace(place, coordinator=join_address("127.0.0.1", find_port(environment, place.job)))
    if coordinator := launcher.find_coordinator(environment):
        check_address(coordinator, launcher.name, _REMEDY)
        return replace(place, coordinator=coordinator)
    raise _refusal(launcher.size, str(size), f"{launcher.name} does not say where rank 0 is")


def _with_coordinator(place: Place, environment: _Environment) -> Place:
    """The place with the coordinator that the user names, if any. Raises OptionError where nothing names one."""
    if place.size == 1:
        return place
    coordinator = _named_coordinator(environment) or place.coordinator
    if not coordinator:
        raise OptionError(
            f"{place.job}: this is one of {place.size} processes, but nothing says where rank 0 is",
            where="SHARDWRIGHT_COORDINATOR",
            remedy=f"set it for all of them: {_REMEDY}",
        )
    return replace(place, coordinator=coordinator)


def _named_coordinator(environment: _Environment) -> str:
    """The coordinator that the user names, for JAX or PyTorch; "" where there is none. Raises OptionError."""
    for name in ("SHARDWRIGHT_COORDINATOR", "JAX_COORDINATOR_ADDRESS"):
        if address := environment.get(name, ""):
            check_address(address, name, _REMEDY)
            return address
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not (host and port):
        return ""
    number = read_number(environment, "MASTER_PORT")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1"):
        number += 1 if number < 65535 else -1  # torchrun itself listens at the port
    number = read_number(environment, "JAX_COORDINATOR_PORT", number)
    address = join_address(host.strip("[]"), number)
    check_address(address, "MASTER_ADDR", _REMEDY)
    return address


def find_port(environment: _Environment, job: str) -> int:
    """The port of a job, from its name; `JAX_COORDINATOR_PORT` where that is set."""
    digest = hashlib.blake2b(job.encode(), digest_size=4).hexdigest()
    return read_number(environment, "JAX_COORDINATOR_PORT", JOB_PORTS[int(digest, 16) % len(JOB_PORTS)])


_REMEDY = "host:port, of a free port of rank 0's host"


def _refusal(variable: str, value: str, why: str) -> OptionError:
    return OptionError(
        f"{variable}={value}: this is one of {value} processes, but {why}",
        where=variable,
        remedy="give all of them SHARDWRIGHT_COORDINATOR=host:port, a free port of rank 0's host (and SHARDWRIGHT_RANK "
        "where no variable says it), or start them with: shardwright run -np …; where each is a job of its own, "
        "set SHARDWRIGHT_SIZE=1",
    )


# ---- the table -------------------------------------------------------------------
def _open_mpi_coordinator(environment: _Environment) -> str:
    """`mpirun`'s own host, on which rank 0 is as well: Open MPI 4 names its addresses, 5 its name."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.search(r"tcp://([^,:;]+)|tcp6://\[([^],]+)", uri)
    space = re.fullmatch(r"prterun-(.+)-\d+@\d+", environment.get("PMIX_NAMESPACE", ""))
    host = (match[1] or match[2]) if match else space[1] if space else ""
    name = uri.partition(";")[0] or environment.get("PMIX_NAMESPACE", "")
    return join_address(host, find_port(environment, name)) if host else ""


LAUNCHERS = (
    Launcher(
        name="torchrun", rank="RANK", size="WORLD_SIZE", local_rank="LOCAL_RANK", local_size="LOCAL_WORLD_SIZE",
        cross_rank="GROUP_RANK", cross_size="GROUP_WORLD_SIZE", jobs=("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(
        name="Open MPI", rank="OMPI_COMM_WORLD_RANK", size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK", local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        jobs=("OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        find_coordinator=_open_mpi_coordinator,
    ),
    Launcher(
        name="horovodrun", rank="HOROVOD_RANK", size="HOROVOD_SIZE", local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE", cross_rank="HOROVOD_CROSS_RANK", cross_size="HOROVOD_CROSS_SIZE",
        jobs=("HOROVOD_GLOO_RENDEZVOUS_PORT",),
    ),
    Launcher(
        name="jsrun", rank="JSM_NAMESPACE_RANK", size="JSM_NAMESPACE_SIZE", local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE", jobs=("LSB_JOBID",),
    ),
    Launcher(
        name="MVAPICH", rank="MV2_COMM_WORLD_RANK", size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK", local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        name="Flux", rank="FLUX_TASK_RANK", size="FLUX_JOB_SIZE", local_rank="FLUX_TASK_LOCAL_ID",
        nodes="FLUX_JOB_NNODES", jobs=("FLUX_JOB_ID",),
    ),
    Launcher(
        name="PALS", rank="PALS_RANKID", size="PMI_SIZE", local_rank="PALS_LOCAL_RANKID", local_size="PALS_LOCAL_SIZE",
        jobs=("PALS_APID",),
    ),
    Launcher(
        name="MPICH's or Intel's mpiexec", rank="PMI_RANK", size="PMI_SIZE", local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
)  # fmt: skip
