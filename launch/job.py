"""Jobs: processes on hosts, of one command or of several."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.launch.hosts import Host, Placement, first_address

#: Names of variables with secret values.
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS(WORD|WD|PHRASE)?(_|$)|(^|_)KEY|KEY$|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE
)
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "***"

#: Variables of the launcher's machine or login: other hosts have their own.
_MACHINE_VARIABLE = re.compile(
    r"HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|HOSTNAME|HOST|TERM|DISPLAY|MAIL|TMPDIR|TEMP|TMP|EDITOR|SHLVL|_|LS_COLORS"
    r"|(SSH|XDG|DBUS|LC|LESS|BASH_FUNC|GPG|WAYLAND|SUDO|SYSTEMD|INVOCATION|JOURNAL)_.*|LANG|LANGUAGE|PS\d"
)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a job.

    number: its index in the job, a rank's number. kind: `rank`, `task` or `doctor`. label: prefix of its lines.
    environment: variables of its own, besides the job's.
    """

    number: int
    kind: str
    label: str
    host: Host
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """Its name in messages: `rank 3`."""
        return f"{self.kind} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Processes with a common start and end.

    directory: their working directory. environment: variables of all of them, on every host.
    fail_fast: the first failing process ends the others; else each runs to its end. restarts: they are servers, which
    are started again where they are lost; may_shrink: and the others go on where that is no use.
    """

    processes: tuple[ProcessSpec, ...]
    directory: str
    environment: Mapping[str, str] = field(default_factory=dict)
    fail_fast: bool = True
    restarts: bool = False
    may_shrink: bool = False

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the processes, in order, each once."""
        return tuple({process.host.name: process.host for process in self.processes}.values())

    def variables(self, process: ProcessSpec, *, local: bool) -> dict[str, str]:
        """Variables added to a process's environment; on other hosts also the launcher's."""
        inherited = {} if local else select_exported_variables(os.environ)
        unbuffered = {} if "PYTHONUNBUFFERED" in os.environ else {"PYTHONUNBUFFERED": "1"}
        return {**inherited, **unbuffered, **self.environment, **process.environment}


def rank_job(
    placements: Sequence[Placement],
    command: Sequence[str],
    *,
    coordinator: str,
    meeting: str,
    environment: Mapping[str, str],
) -> Job:
    """One process a rank, all of one command.

    coordinator, meeting: `host:port` of the coordination service, and of where the ranks meet before they ask it.
    """
    first_host = first_address([place.host for place in placements])
    return Job(
        processes=tuple(
            ProcessSpec(
                number=place.rank,
                kind="rank",
                label=str(place.rank),
                host=place.host,
                command=tuple(command),
                environment=without_chosen(
                    rank_variables(place, len(placements), coordinator, first_host=first_host, meeting=meeting),
                    chosen=environment,
                ),
            )
            for place in placements
        ),
        directory=working_directory(),
        environment=environment,
    )


def rank_variables(
    place: Placement,
    size: int,
    coordinator: str,
    *,
    first_host: str = "127.0.0.1",
    generation: int = 0,
    meeting: str = "",
) -> dict[str, str]:
    """A rank's variables: its place among the ranks, the coordinator, and where they meet ("": they need not).

    first_host: rank 0's, as the others reach it.
    """
    values = {
        "COORDINATOR": coordinator,
        "SIZE": size,
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.cross_rank,
        "CROSS_SIZE": place.cross_size,
        "GENERATION": generation,
    }
    if meeting:
        values["MEETING"] = meeting
    variables = {f"SHARDWRIGHT_{name}": str(value) for name, value in values.items()}
    variables |= peer_variables(place, size, coordinator, first_host)
    # Rank 0's `jax.distributed.initialize` starts a service in any case: this one out of everybody's way.
    return {**variables, "JAX_COORDINATOR_ADDRESS": coordinator, "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0"}


def without_chosen(variables: Mapping[str, str], *, chosen: Collection[str]) -> dict[str, str]:
    """A rank's variables without those of torch.distributed's store that the user has set for all ranks, `chosen`."""
    store = {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in variables.items() if name not in store or name not in chosen}


#: Ports of torch.distributed's store on rank 0's host: those that the kernel gives to nobody who asks for any.
_STORE_PORTS = range(61440, 65536)


def peer_variables(place: Placement, size: int, coordinator: str, first_host: str) -> dict[str, str]:
    """The same place by the names of `horovodrun` and `torchrun`, for programs and libraries that read those.

    `MASTER_ADDR`, `MASTER_PORT`: of rank 0's host, for a store that rank 0 opens there; jobs differ in the port.
    """
    horovod = {
        "RANK": place.rank,
        "SIZE": size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.cross_rank,
        "CROSS_SIZE": place.cross_size,
        "HOSTNAME": place.host.name,
        "CONTROLLER": "gloo",
    }
    digest = hashlib.blake2b(coordinator.encode(), digest_size=4).hexdigest()
    torchrun = {
        "RANK": place.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.cross_rank,
        "GROUP_WORLD_SIZE": place.cross_size,
        "MASTER_ADDR": first_host,
        "MASTER_PORT": _STORE_PORTS[int(digest, 16) % len(_STORE_PORTS)],
        "TORCHELASTIC_RUN_ID": digest,
    }
    named = {f"HOROVOD_{name}": value for name, value in horovod.items()} | torchrun
    return {name: str(value) for name, value in named.items()}


def check_job(hosts: Sequence[Host], environment: Mapping[str, str]) -> Job:
    """`shardwright doctor` on every host, each to its end."""
    command = (sys.executable, "-m", "shardwright", "doctor")
    return Job(
        processes=tuple(
            ProcessSpec(number=index, kind="doctor", label=host.name, host=host, command=command)
            for index, host in enumerate(hosts)
        ),
        directory=working_directory(),
        environment=environment,
        fail_fast=False,
    )


def server_job(path: Path, environment: Mapping[str, str], options: Sequence[str] = ()) -> Job:
    """The server of every node of a cluster file, on that node; the file must have the same path there.

    options: of each server's command line.

    Raises ClusterConfigError.
    """
    cluster = Cluster.load(path, for_planning=True)
    hosts = {node.ip: Host(name=node.ip) for node in cluster.nodes}
    return Job(
        processes=tuple(
            ProcessSpec(
                number=node.index,
                kind="task",
                label=f"{node.index} {node.address}",
                host=hosts[node.ip],
                command=(sys.executable, "-m", "shardwright.server", os.path.abspath(path), str(node.index), *options),
            )
            for node in cluster.nodes
        ),
        directory=working_directory(),
        environment=environment,
        restarts=True,
        may_shrink=cluster.is_elastic,
    )


def working_directory() -> str:
    """Where processes run: the launcher's own folder. Raises OptionError where that is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        remedy = "change to a folder that is there"
        raise OptionError("the working directory is gone", where="shardwright run", remedy=remedy) from None


def resolve_command(words: Sequence[str]) -> tuple[str, ...]:
    """The command by absolute path: every host runs the same program.

    `python` and `python3` are the interpreter of the launcher; it also runs `.py` files. Raises OptionError for a
    missing program.
    """
    program, *arguments = words
    if program in ("python", "python3"):
        return (sys.executable, *arguments)
    if program.endswith(".py") and Path(program).is_file() and not os.access(program, os.X_OK):
        return (sys.executable, *words)
    path = shutil.which(program)
    if path is None:
        raise OptionError(
            f"there is no program {program!r}",
            where="shardwright run",
            remedy="write the command after the options: shardwright run -np 4 python train.py",
        )
    return (os.path.abspath(path), *arguments)


def select_exported_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the launcher's variables for other hosts: all but those of its own machine."""
    return {
        name: value
        for name, value in environment.items()
        if _VARIABLE_NAME.fullmatch(name) and not _MACHINE_VARIABLE.fullmatch(name)
    }


def mask_secret(name: str, value: str) -> str:
    """Mask secrets of a value: `***` for names such as WANDB_API_KEY, and for passwords in URLs."""
    if _SECRET_NAME.search(name):
        return _MASK
    return _SECRET_IN_URL.sub(_MASK, value)
