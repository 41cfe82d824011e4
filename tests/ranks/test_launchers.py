"""Whoever started the processes, they are one job: the place that variables give, and real jobs formed by them."""

from __future__ import annotations

import json
import logging
import re
import socket
from typing import Any

import pytest
from jax._src import clusters

import shardwright as sw
from shardwright.ranks import joining, places, slurm
from shardwright.ranks.launchers import LAUNCHERS, find_place
from tests.ranks.processes import assert_passed, run_processes

_SLURM = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "node[07-08],login", "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)", "SLURM_STEP_NUM_NODES": "3",
}  # fmt: skip
_TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node07", "MASTER_PORT": "29500",
}  # fmt: skip
_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
_ORTE = {**_OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
_FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1", "FLUX_JOB_ID": "f2"}
_TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "3"}


@pytest.mark.parametrize(
    ("variables", "rank", "size", "local", "cross", "coordinator"),
    [
        ({}, 0, 1, (0, 1), (0, 1), ""),
        (_SLURM, 2, 4, (0, 1), (1, 3), None),
        ({**_SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "2000"}, 2, 4, (0, 1), (1, 3), "head:2000"),
        ({**_SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 0, 1, (0, 1), (0, 1), ""),
        (_TORCHRUN, 3, 4, (1, 2), (1, 2), "node07:29500"),
        ({**_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 3, 4, (1, 2), (1, 2), "node07:29501"),
        ({**_SLURM, **_TORCHRUN}, 3, 4, (1, 2), (1, 2), "node07:29500"),
        ({**_SLURM, **_TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, 0, 1, (0, 1), (0, 1), ""),
        ({**_SLURM, "WORLD_SIZE": "4"}, 2, 4, (0, 1), (1, 3), None),
        (_ORTE, 3, 4, (1, 2), None, None),
        ({**_OPEN_MPI, "PMIX_NAMESPACE": "prterun-node07-81@1"}, 3, 4, (1, 2), None, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "JAX_COORDINATOR_ADDRESS": "a:1"}, 1, 2, None, None, "a:1"),
        ({**_SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}, 2, 4, (0, 1), (1, 3), None),
        (_FLUX, 1, 2, None, None, None),
        (_TPU, 3, 4, None, None, "t0:8482"),
        (
            {**_TPU, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "h:8080"},
            7, 8, None, None, "h:8482",
        ),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, 0, 1, (0, 1), (0, 1), ""),
        (
            {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "HOSTNAME": "train-1"}, 1, 2, None, None, "train-0:55527",
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "SHARDWRIGHT_SIZE": "2", "SHARDWRIGHT_COORDINATOR": "train-0:2"},
            1, 2, None, None, "train-0:2",
        ),
        ({"JOB_COMPLETION_INDEX": "1", "SHARDWRIGHT_SIZE": "1", "SHARDWRIGHT_RANK": "0"}, 0, 1, (0, 1), (0, 1), ""),
        ({**_TORCHRUN, "SHARDWRIGHT_SIZE": "1"}, 0, 1, (0, 1), (0, 1), "node07:29500"),
    ],
)  # fmt: skip
def test_the_nearest_launcher_gives_the_place(variables, rank, size, local, cross, coordinator) -> None:
    place = find_place(variables)
    assert (place.rank, place.size) == (rank, size)
    assert local is None or (place.local_rank, place.local_size) == local
    assert cross is None or (place.cross_rank, place.cross_size) == cross
    assert place.coordinator == coordinator if coordinator is not None else place.coordinator
    if cross is not None:
        assert place.has_neighbors


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_more_than_one_process_without_a_coordinator_is_refused_by_name(launcher) -> None:
    with pytest.raises(sw.OptionError, match="does not say where rank 0 is") as caught:
        find_place({launcher.rank: "0", launcher.size: "2"})
    assert caught.value.where == launcher.size
    assert launcher.name in str(caught.value)
    assert find_place({launcher.rank: "0", launcher.size: "1"}).size == 1
    formed = find_place({launcher.rank: "1", launcher.size: "2", "SHARDWRIGHT_COORDINATOR": "host:1"})
    assert (formed.rank, formed.size, formed.coordinator) == (1, 2, "host:1")


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE"),
        ({**_TORCHRUN, "RANK": "4"}, "RANK"),
        ({**_TORCHRUN, "RANK": "x"}, "RANK"),
        ({**_TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_ADDR"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, "SLURM_STEP_NODELIST"),
        ({**_SLURM, "SLURM_PROCID": "9"}, "SLURM_PROCID"),
        ({**_SLURM, "SLURM_STEP_NODELIST": "node[a-b]"}, "SLURM_STEP_NODELIST"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID"),
        ({**_TPU, "MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID"),
        ({**_TPU, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}, "MEGASCALE_COORDINATOR_ADDRESS"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX"),
        ({"SHARDWRIGHT_SIZE": "2", "SHARDWRIGHT_COORDINATOR": "a:1"}, "SHARDWRIGHT_RANK"),
    ],
)
def test_what_cannot_be_formed_is_refused_by_its_variable(variables, where: str) -> None:
    with pytest.raises(sw.OptionError) as caught:
        find_place(variables)
    assert caught.value.where == where


@pytest.mark.parametrize(
    "step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}]
)
@pytest.mark.parametrize("task", [{}, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}])
def test_an_allocation_is_no_job_before_srun(step, task, caplog) -> None:
    """In a shell of salloc, in a script of sbatch: a job of one, with a word."""
    caplog.set_level(logging.WARNING, "shardwright.ranks")
    allocation = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-4]"}
    assert find_place({**allocation, **step, **task}).size == 1
    assert ("srun has not started" in caplog.text) == bool(task)


def test_hosts_and_counts_of_slurm() -> None:
    assert slurm.expand_hosts("node[001-003,7]-ib,b,r[1-2]n[0-1]") == [
        "node001-ib", "node002-ib", "node003-ib", "node7-ib", "b", "r1n0", "r1n1", "r2n0", "r2n1",
    ]  # fmt: skip
    assert slurm.expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert slurm.expand_counts("") == []


def test_jaxs_own_detectors_say_the_same(monkeypatch) -> None:
    for variables, cluster in ((_SLURM, clusters.SlurmCluster), (_ORTE, clusters.OmpiCluster)):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            place = find_place(variables)
            host, _, _ = cluster.get_coordinator_address(10, None).rpartition(":")
            assert cluster.is_env_present()
            assert (place.rank, place.size) == (cluster.get_process_id(), cluster.get_process_count())
            assert place.local_rank == cluster.get_local_process_id()
            assert place.coordinator.rpartition(":")[0] == host


def test_neighbors_are_the_ranks_of_the_same_host() -> None:
    hosts = [0, 1, 0, 0, 1, 2]
    found = [places.Place(rank=rank, size=6).among(hosts) for rank in range(6)]
    assert [(place.local_rank, place.local_size) for place in found] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2), (0, 1)]
    assert [(place.cross_rank, place.cross_size) for place in found] == [(0, 3), (1, 3), (0, 2), (0, 1), (1, 2), (2, 3)]


def test_arguments_of_init_stand_instead_of_variables() -> None:
    assert places.make_place(None, 1, None).size == 1
    place = places.make_place(1, 2, "[::1]:29400")
    assert (place.rank, place.size, place.coordinator) == (1, 2, "[::1]:29400")
    for given, where in [((2, 2, "a:1"), "rank"), ((0, 2, None), "coordinator"), ((0, None, "a:1"), "size")]:
        with pytest.raises(sw.OptionError) as caught:
            places.make_place(*given)
        assert caught.value.where == where


def test_rank_0_that_is_no_host_of_that_name_is_refused_at_once() -> None:
    step = {**_SLURM, "SLURM_STEP_NODELIST": "node[07-08].invalid,login", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    with pytest.raises(sw.LaunchError, match="does not know the host") as caught:
        joining.meet_others(find_place(step), joining.JoinOptions())
    assert caught.value.where.startswith("node07.invalid:")


def test_rank_1_says_where_it_looks_for_rank_0(caplog) -> None:
    caplog.set_level(logging.WARNING, "shardwright.ranks")
    options = joining.JoinOptions(stall_warning_s=0.1, stall_shutdown_s=0.8)
    with pytest.raises(sw.LaunchError, match="rank 0 does not answer at"):
        joining.meet_others(places.make_place(1, 2, f"127.0.0.1:{free_port()}"), options)
    assert "rank 1 of 2 has waited in sw.ranks.init" in caplog.text


# ---- real jobs -------------------------------------------------------------------
def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def _each(variables: dict[str, str], **ranked: str) -> list[dict[str, str]]:
    return [{**variables, **{name: str(rank) for name in ranked.values()}} for rank in (0, 1)]


def _jobs() -> dict[str, list[dict[str, str]]]:
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    port = {"JAX_COORDINATOR_PORT": free_port()}
    return {
        "torchrun": _each({**here, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
                           "GROUP_WORLD_SIZE": "1"}, rank="RANK", local="LOCAL_RANK"),
        "pytorchjob": _each({**here, "WORLD_SIZE": "2"}, rank="RANK"),
        "slurm": _each({**port, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1",
                        "SLURM_NTASKS": "2"}, rank="SLURM_PROCID", local="SLURM_LOCALID"),
        "open mpi 4": _each({**port, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://127.0.0.1:1",
                             "OMPI_COMM_WORLD_SIZE": "2"}, rank="OMPI_COMM_WORLD_RANK"),
        "open mpi 5": _each({**port, "PMIX_NAMESPACE": f"prterun-x-{here['MASTER_PORT']}@1",
                             "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
                            rank="OMPI_COMM_WORLD_RANK", local="OMPI_COMM_WORLD_LOCAL_RANK"),
        "mpich": _each({**here, "PMI_SIZE": "2"}, rank="PMI_RANK"),
        "tpu": _each({**port, "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.1"}, rank="TPU_WORKER_ID"),
        "kubernetes": _each({"SHARDWRIGHT_SIZE": "2", "SHARDWRIGHT_COORDINATOR": f"127.0.0.1:{free_port()}"},
                            rank="JOB_COMPLETION_INDEX"),
        "by hand": _each({"SHARDWRIGHT_SIZE": "2", "SHARDWRIGHT_COORDINATOR": f"localhost:{free_port()}"},
                         rank="SHARDWRIGHT_RANK"),
        "by name": _each({"SHARDWRIGHT_SIZE": "2", "SHARDWRIGHT_COORDINATOR": f"{socket.gethostname()}:{free_port()}"},
                         rank="SHARDWRIGHT_RANK"),
    }  # fmt: skip


def _results(environments: list[dict[str, str]], timeout_s: float = 60, **arguments: Any) -> list[dict[str, Any]]:
    done = run_processes("tests.ranks.check_place", environments, str(timeout_s), json.dumps(arguments), timeout_s=120)
    assert_passed(done)
    return [json.loads(next(line for line in child.stdout.splitlines() if line.startswith("{"))) for child in done]


@pytest.mark.cluster
@pytest.mark.parametrize("name", list(_jobs()))
def test_processes_of_a_launcher_are_one_job(name: str) -> None:
    found = _results(_jobs()[name])
    assert [place["rank"] for place in found] == [0, 1]
    assert all(place["size"] == 2 and place["everyone"] == [0, 1] for place in found), found
    assert [place["local"] for place in found] == [[0, 2], [1, 2]]
    assert [place["cross"] for place in found] == [[0, 1], [0, 1]]


@pytest.mark.cluster
def test_torchruns_processes_are_one_job_left_and_joined_again() -> None:
    """Two rounds by torchrun's variables: init, collectives, shutdown, init."""
    assert_passed(run_processes("tests.ranks.check_again", _jobs()["torchrun"], "2", "2", timeout_s=60))


@pytest.mark.cluster
def test_ranks_that_miss_are_named_and_others_jobs_are_refused() -> None:
    port = free_port()
    job = {"SHARDWRIGHT_SIZE": "3", "SHARDWRIGHT_COORDINATOR": f"127.0.0.1:{port}", "SHARDWRIGHT_STALL_WARNING_S": "1"}
    first, second, stranger, twin = _results(
        [
            {**job, "SHARDWRIGHT_RANK": "0"}, {**job, "SHARDWRIGHT_RANK": "2"},
            {**job, "SHARDWRIGHT_RANK": "1", "SHARDWRIGHT_SIZE": "2"}, {**job, "SHARDWRIGHT_RANK": "2"},
        ],
        timeout_s=40,
    )  # fmt: skip
    waits = "rank 1 has not called sw.ranks.init, in which"
    both, alone = (
        rf"{waits} ranks 0, 2 have waited",
        rf"{waits} rank 0 has waited for .*; rank 2 had called it, and left",
    )
    assert re.search(f"{both}|{alone}", first["error"])
    errors = sorted([second["error"], twin["error"]], key=lambda text: "another process" in text)
    assert "rank 1 has not called" in errors[0]
    assert "another process is rank 2 already" in errors[1]
    assert "it says that there are 2 ranks, rank 0 says 3" in stranger["error"]
