"""A process's place among the hosts of a TPU pod, and among the pods of an indexed job of Kubernetes.

Ports as in JAX, whose own detectors are asked for what no variable says: the metadata server of a TPU's virtual
machine, the interface of Kubernetes (with the package `kubernetes`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping

from shardwright.clusters.cluster import join_address
from shardwright.errors import LaunchError, OptionError
from shardwright.ranks.places import Place, read_number
from shardwright.xla import private

_Found = tuple[int, int, str] | None

_TPU_PORT, _KUBERNETES_PORT = 8482, 55527


def find_tpu_place(environment: Mapping[str, str]) -> Place | None:
    """The place of a process of a TPU pod, one a host; alone on a single host. None elsewhere. Raises OptionError."""
    hosts = _tpu_hosts(environment)
    slices = read_number(environment, "MEGASCALE_NUM_SLICES", 1)
    if not hosts:
        pod = _ask(private.find_tpu_pod, "the metadata server")
        return None if pod is None else _place_of(*pod, job="TPU")
    size = len(hosts) * slices
    if size == 1:
        return Place()
    worker = next((name for name in ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID") if environment.get(name)), "")
    if not worker:
        raise OptionError(
            f"{size} hosts, but nothing says which this is",
            where="TPU_WORKER_ID",
            remedy="set it: 0 to the number of hosts",
        )
    if slices > 1 and not environment.get("MEGASCALE_SLICE_ID"):
        raise OptionError(f"which of {slices} slices is this?", where="MEGASCALE_SLICE_ID", remedy="set it, from 0")
    named = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    if slices > 1 and not named:
        raise OptionError(
            f"nothing says where the first of {slices} slices is",
            where="MEGASCALE_COORDINATOR_ADDRESS",
            remedy="set it, or SHARDWRIGHT_COORDINATOR",
        )
    index, slice_index = read_number(environment, worker, 0), read_number(environment, "MEGASCALE_SLICE_ID", 0)
    for name, at, count in ((worker, index, len(hosts)), ("MEGASCALE_SLICE_ID", slice_index, slices)):
        if at >= count:
            raise OptionError(f"{at} is not below {count}", where=name, remedy="numbers begin at 0")
    port = read_number(environment, "JAX_COORDINATOR_PORT", _TPU_PORT)
    coordinator = join_address(_host_of(named) if named else hosts[0], port)
    return _place_of(index + slice_index * len(hosts), size, coordinator, job="TPU")


def _tpu_hosts(environment: Mapping[str, str]) -> list[str]:
    text = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    return [_host_of(item) for item in text.split(",") if item.strip()]


def _host_of(address: str) -> str:
    """The host of `host:port` or `host`."""
    return re.sub(r":\d+$", "", address.strip()).strip("[]")


def find_kubernetes_place(environment: Mapping[str, str]) -> Place | None:
    """The place of a pod of an indexed job. None elsewhere. Raises OptionError where nothing says how many."""
    if not environment.get("JOB_COMPLETION_INDEX"):
        return None
    rank = read_number(environment, "JOB_COMPLETION_INDEX", 0)
    size = read_number(environment, "WORLD_SIZE", 0)
    if not size:
        pod = _ask(private.find_kubernetes_job, "Kubernetes")
        if pod is None:
            raise OptionError(
                f"JOB_COMPLETION_INDEX={rank}: this is a pod of an indexed job, but nothing says of how many",
                where="JOB_COMPLETION_INDEX",
                remedy="set SHARDWRIGHT_SIZE in the pods to the job's completions (1: each pod is a job of its own), "
                "or install the package kubernetes, by which JAX asks",
            )
        return _place_of(*pod, job="Kubernetes")
    if rank >= size:
        raise OptionError(
            f"{rank} is not below WORLD_SIZE={size}", where="JOB_COMPLETION_INDEX", remedy="set WORLD_SIZE"
        )
    return _place_of(rank, size, first_pod(environment), job="Kubernetes")


def first_pod(environment: Mapping[str, str]) -> str:
    """`host:port` of the pod 0: a pod is called after its job and its index, in the domain of the headless service."""
    index = environment.get("JOB_COMPLETION_INDEX", "").strip()
    name, dot, domain = socket.getfqdn().partition(".")
    if not name.endswith(f"-{index}"):
        name, dot, domain = environment.get("HOSTNAME", "").partition(".")
    if not index or not name.endswith(f"-{index}"):
        return ""
    first = name.removesuffix(f"-{index}") + "-0"
    return join_address(first + dot + domain, read_number(environment, "JAX_COORDINATOR_PORT", _KUBERNETES_PORT))


def _ask(find: Callable[[], _Found], whom: str) -> _Found:
    try:
        return find()
    except Exception as error:  # of the package, the network, the rights of the pod
        raise LaunchError(
            f"{whom} does not say what this job is: {str(error).strip()}",
            where="sw.ranks.init",
            remedy="mend that, or set SHARDWRIGHT_RANK, SHARDWRIGHT_SIZE and SHARDWRIGHT_COORDINATOR",
        ) from error


def _place_of(rank: int, size: int, coordinator: str, *, job: str) -> Place:
    if size == 1:
        return Place()
    return Place(coordinator=coordinator, size=size, rank=rank, job=job, has_neighbors=False)
