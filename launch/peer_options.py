"""Options of `horovodrun` and `torchrun`, in our words: what each sets here, or why it has no effect.

An option that would change what a program computes or where it runs, and that has no counterpart, is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOption:
    """One option. values: how many words follow it.

    setting: the option of ours, by its name in `settings`, that takes its value; fixed: the value that it stands for.
    without_effect: why nothing is set; "" where what it asks for is so anyway. refused: why it cannot be, and `remedy`.
    """

    flags: tuple[str, ...]
    values: int = 1
    setting: str = ""
    fixed: Any = None
    without_effect: str | None = None
    refused: str = ""
    remedy: str = ""

    @property
    def key(self) -> str:
        """Its name where options are kept: its last flag without dashes."""
        return self.flags[-1].lstrip("-").replace("-", "_")


_CHOSEN = "XLA, NCCL and the size of a message choose that"
_NO_CYCLES = "ranks call in one order, so there is no cycle and no cache of names"
_NO_MPI = "ranks need no MPI"
_MEETING = "the launcher is where ranks meet"
_SHOWN = "all output is shown, with the rank ahead of each line"


def _same(setting: str, *flags: str) -> PeerOption:
    return PeerOption(flags=flags, setting=setting)


def _fixed(setting: str, value: Any, *flags: str) -> PeerOption:
    return PeerOption(flags=flags, values=0, setting=setting, fixed=value)


def _idle(reason: str, *flags: str, values: int = 1) -> PeerOption:
    return PeerOption(flags=flags, values=values, without_effect=reason)


HOROVODRUN = (
    _same("np", "--num-proc"),
    _same("hosts_file", "-hostfile", "--hostfile"),
    _same("config", "--config-file"),
    _same("output_dir", "--output-filename"),
    _same("ssh_identity", "--ssh-identity-file"),
    _same("min_np", "--min-num-proc"),
    _same("max_np", "--max-num-proc"),
    _same("slots_per_host", "--slots", "--slots-per-host"),
    _same("timeline", "--timeline-filename"),
    _same("stall_warning", "--stall-check-warning-time-seconds"),
    _same("stall_shutdown", "--stall-check-shutdown-time-seconds"),
    _fixed("stall_warning", "0", "--no-stall-check"),
    _fixed("timestamps", True, "-prefix-timestamp", "--prefix-output-with-timestamp"),
    PeerOption(flags=("--blacklist-cooldown-range",), values=2),
    PeerOption(flags=("--network-interface", "--network-interfaces")),
    PeerOption(flags=("--tcp",), values=0),
    _idle("", "--stall-check", values=0),
    _idle("", "--gloo", values=0),
    _idle(_NO_MPI, "--mpi", values=0),
    PeerOption(
        flags=("--jsrun",),
        values=0,
        refused=_NO_MPI,
        remedy="start the program with jsrun itself, which is known",
    ),
    PeerOption(flags=("--mpi-args",), refused=_NO_MPI, remedy="variables are --env NAME=VALUE"),
    PeerOption(flags=("--binding-args",), refused=_NO_MPI, remedy="bind with taskset or numactl ahead of the command"),
    _idle(_NO_MPI, "--mpi-threads-disable", values=0),
    _idle("", "--no-mpi-threads-disable", values=0),
    _idle("nothing is checked ahead of the start", "--disable-cache", values=0),
    _idle(_CHOSEN, "--fusion-threshold-mb"),
    _idle(_NO_CYCLES, "--cycle-time-ms"),
    _idle(_NO_CYCLES, "--cache-capacity"),
    _idle(_CHOSEN, "--hierarchical-allreduce", values=0),
    _idle(_CHOSEN, "--hierarchical-allgather", values=0),
    _idle(_CHOSEN, "--torus-allreduce", values=0),
    _idle("", "--no-hierarchical-allreduce", values=0),
    _idle("", "--no-hierarchical-allgather", values=0),
    _idle("", "--no-torus-allreduce", values=0),
    _idle(_CHOSEN, "--autotune", values=0),
    _idle("", "--no-autotune", values=0),
    _idle(_CHOSEN, "--autotune-log-file"),
    _idle(_CHOSEN, "--autotune-warmup-samples"),
    _idle(_CHOSEN, "--autotune-steps-per-sample"),
    _idle(_CHOSEN, "--autotune-bayes-opt-max-samples"),
    _idle(_CHOSEN, "--autotune-gaussian-process-noise"),
    _idle(_NO_CYCLES, "--timeline-mark-cycles", values=0),
    _idle("", "--no-timeline-mark-cycles", values=0),
    _idle(_CHOSEN, "--num-nccl-streams"),
    _idle("no thread of ours waits for calls", "--thread-affinity"),
    _idle("--stall-shutdown ends a job in which ranks wait", "--gloo-timeout-seconds"),
    _idle("--verbose says what the launcher does; ranks log by Python's logging", "--log-level"),
    _idle("--timestamps has them", "--log-with-timestamp", values=0),
    _idle("", "--log-without-timestamp", values=0),
    _idle("", "--log-hide-timestamp", values=0),
    _idle("--timestamps has them", "--no-log-hide-timestamp", values=0),
)

TORCHRUN = (
    PeerOption(flags=("--nnodes",)),
    PeerOption(flags=("--nproc_per_node", "--nproc-per-node")),
    PeerOption(flags=("--node_rank", "--node-rank")),
    PeerOption(flags=("--master_addr", "--master-addr")),
    PeerOption(flags=("--master_port", "--master-port")),
    PeerOption(flags=("-m", "--module"), values=0),
    _same("output_dir", "--log_dir", "--log-dir"),
    _same("grace", "--shutdown_timeout", "--shutdown-timeout"),
    _idle("", "--no_python", "--no-python", values=0),
    _idle("", "--standalone", values=0),
    _idle(_MEETING, "--rdzv_backend", "--rdzv-backend"),
    _idle(_MEETING, "--rdzv_endpoint", "--rdzv-endpoint"),
    _idle(_MEETING, "--rdzv_id", "--rdzv-id"),
    _idle(_MEETING, "--rdzv_conf", "--rdzv-conf"),
    _idle(_MEETING, "--local_addr", "--local-addr"),
    _idle("lost ranks are replaced in elastic jobs: --min-np", "--max_restarts", "--max-restarts"),
    _idle("ranks are watched all the time", "--monitor_interval", "--monitor-interval"),
    _idle("ranks are new processes", "--start_method", "--start-method"),
    _idle("", "--run_path", "--run-path", values=0),
    _idle("ranks have no roles", "--role"),
    _idle(_SHOWN, "-r", "--redirects"),
    _idle(_SHOWN, "-t", "--tee"),
    _idle(_SHOWN, "--local_ranks_filter", "--local-ranks-filter"),
    _idle("the launcher says what it does with --verbose", "--event_log_handler", "--event-log-handler"),
)

PEER_OPTIONS = (*HOROVODRUN, *TORCHRUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What options of the others set here: our options by name, variables of the ranks, lines for the user.

    as_module: the command is a module of Python's.
    """

    values: Mapping[str, Any]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    as_module: bool = False


def translate(given: Mapping[str, Any], *, has_hosts: bool = False) -> Translation:
    """Options of `horovodrun` and `torchrun`, by `PeerOption.key`, in ours. has_hosts: hosts are named by an option.

    Raises OptionError for what cannot be done here.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    for option in PEER_OPTIONS:
        value = given.get(option.key)
        if value is None or value is False:
            continue
        flag = option.flags[-1]
        if option.refused:
            raise OptionError(option.refused, where=flag, remedy=option.remedy)
        if option.setting:
            values[option.setting] = value if option.fixed is None else option.fixed
        elif option.without_effect:
            notes.append(f"{flag} has no effect here: {option.without_effect}")
    if cooldown := given.get("blacklist_cooldown_range"):
        values["host_cooldown"] = cooldown[0]
    values |= _read_ranks(given, has_hosts=has_hosts)
    return Translation(
        values=values,
        environment=_read_variables(given),
        notes=tuple(notes),
        as_module=bool(given.get("module")),
    )


def _read_variables(given: Mapping[str, Any]) -> dict[str, str]:
    variables: dict[str, str] = {}
    if names := given.get("network_interfaces"):
        variables |= {"NCCL_SOCKET_IFNAME": names, "GLOO_SOCKET_IFNAME": names}
    if given.get("tcp"):
        variables["NCCL_IB_DISABLE"] = "1"
    for key in ("master_addr", "master_port"):
        if given.get(key):
            variables[key.upper()] = str(given[key])
    return variables


def _read_ranks(given: Mapping[str, Any], *, has_hosts: bool) -> dict[str, Any]:
    """How many ranks `--nnodes` and `--nproc-per-node` ask for."""
    each = given.get("nproc_per_node")
    least, _, most = str(given.get("nnodes") or "1").partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise OptionError(f"{given['nnodes']!r} is no number of hosts", where="--nnodes", remedy="2, or 1:4")
    if str(given.get("node_rank") or "0") != "0":
        raise OptionError(
            "one launcher starts the ranks of all hosts",
            where="--node-rank",
            remedy="run this once: -H host1:8,host2:8",
        )
    if int(most) > 1 and not has_hosts:
        raise OptionError(
            f"which {most} hosts?", where="--nnodes", remedy="name them, and run this once: -H host1:8,host2:8"
        )
    if each is None:
        return {}
    count = _count_devices(str(each))
    if least == most:
        return {"np": str(int(least) * count)}
    return {"min_np": str(int(least) * count), "max_np": str(int(most) * count)}


def _count_devices(text: str) -> int:
    """`--nproc-per-node`: a number, or what this machine has."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    gpus = len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdecimal()])
    if text == "cpu" or (text == "auto" and not gpus):
        return os.cpu_count() or 1
    if text in ("gpu", "auto") and gpus:
        return gpus
    raise OptionError(
        f"{text!r}: this machine shows no such devices" if text == "gpu" else f"{text!r} is no number of ranks",
        where="--nproc-per-node",
        remedy="a whole number from 1, cpu, gpu or auto",
    )


# ---- Horovod's files ---------------------------------------------------------------
#: A file's sections, and what is ahead of their keys in the names of options.
_SECTIONS = {
    "params": "",
    "autotune": "autotune_",
    "timeline": "timeline_",
    "stall_check": "stall_check_",
    "library_options": "",
    "logging": "log_",
}


def is_horovod_section(key: str, value: Any) -> bool:
    """Whether a key of a YAML file is one of Horovod's files."""
    return (key in _SECTIONS and isinstance(value, dict)) or key == "controller"


def read_section(key: str, value: Any, where: str) -> dict[str, Any]:
    """The options of a section of Horovod's files, by `PeerOption.key`. Raises OptionError."""
    if key == "controller":
        if value not in ("gloo", "mpi"):
            raise OptionError(f"{value!r} is no controller", where=where, remedy="gloo, or mpi")
        return {value: True}
    known = {option.key: option for option in PEER_OPTIONS}
    found: dict[str, Any] = {}
    for name, content in value.items():
        option = {"enabled": key, "no_stall_check": ""}.get(name) or f"{_SECTIONS[key]}{name}"
        if name == "enabled" and key == "stall_check":
            found["no_stall_check"] = content is False
            continue
        if option not in known:
            raise OptionError(f"Horovod's files have no {name!r} in {key}", where=where, remedy="leave it out")
        found[option] = content if known[option].values == 0 or content is None else str(content)
    return found


def read_file_options(given: Mapping[str, Any], path: Path) -> Translation:
    """The same for what a file says: its notes name the file."""
    translation = translate(given)
    return replace(translation, notes=tuple(f"{path}: {note}" for note in translation.notes))
