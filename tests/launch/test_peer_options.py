"""Options of horovodrun and torchrun to `shardwright run`, Horovod's files, and the variables that ranks get."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.cli.app import main
from shardwright.errors import OptionError
from shardwright.launch.hosts import Host, parse_hosts, place_ranks
from shardwright.launch.job import peer_variables, rank_job
from shardwright.launch.peer_options import PEER_OPTIONS, translate
from shardwright.launch.settings import read_settings
from shardwright.ranks.launchers import LAUNCHERS


def dry_run(capsys: pytest.CaptureFixture[str], *options: str, command: str = "true") -> str:
    """What `shardwright run --dry-run` prints."""
    code = main(["run", "--dry-run", *options, "--", command])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out + captured.err


def test_no_flag_is_there_twice() -> None:
    flags = [flag for option in PEER_OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--num-proc", "2"], "rank 1:"),
        (["-np", "2", "--stall-check-warning-time-seconds", "7"], "SHARDWRIGHT_STALL_WARNING_S=7"),
        (["-np", "2", "--no-stall-check"], "SHARDWRIGHT_STALL_WARNING_S=0"),
        (["-np", "2", "--timeline-filename", "/t.json"], "SHARDWRIGHT_TIMELINE=/t.json"),
        (["-np", "2", "--network-interfaces", "eth0"], "NCCL_SOCKET_IFNAME=eth0"),
        (["-np", "2", "--tcp"], "NCCL_IB_DISABLE=1"),
        (["-np", "2", "--cycle-time-ms", "5"], "--cycle-time-ms has no effect here"),
        (["-np", "1", "--master_port", "29501"], "MASTER_PORT=29501"),
        (["--nproc_per_node", "3"], "rank 2:"),
        (["--nproc-per-node=2", "--nnodes=2", "-H", "127.0.0.1:2,192.0.2.1:2"], "rank 3:"),
        (["--nproc-per-node=2", "--nnodes=1:2", "-H", "127.0.0.1:2,192.0.2.1:2"], "2 to 4 ranks"),
        (["-np", "1", "--module"], "-m true"),
    ],
)
def test_an_option_is_taken(options: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert found in dry_run(capsys, *options)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"mpi_args": "-x A"}, "--mpi-args"),
        ({"nnodes": "2"}, "--nnodes"),
        ({"nnodes": "a:b"}, "--nnodes"),
        ({"node_rank": "1"}, "--node-rank"),
        ({"nproc_per_node": "many"}, "--nproc-per-node"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, str], where: str) -> None:
    with pytest.raises(OptionError) as caught:
        translate(options)
    assert caught.value.where == where
    assert caught.value.remedy


def test_what_is_asked_for_anyway_is_taken_without_a_word() -> None:
    assert translate({"gloo": True, "standalone": True, "no_autotune": True}).notes == ()


def test_an_unknown_option_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--nprok-per-node", "2", "true"])
    assert "--nproc-per-node" in capsys.readouterr().err


FILE = """
controller: gloo
params: {fusion_threshold_mb: 32, hierarchical_allreduce: true}
autotune: {enabled: true, warmup_samples: 5}
timeline: {filename: trace.json}
stall_check: {enabled: true, warning_time_seconds: 120, shutdown_time_seconds: 240}
library_options: {num_nccl_streams: 2}
logging: {level: INFO, hide_timestamp: true}
np: 3
"""


def test_horovods_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "horovod.yaml"
    path.write_text(FILE)
    settings = read_settings({}, path)
    assert (settings.size, settings.timeline) == (3, Path("trace.json"))
    assert (settings.stall_warning_s, settings.stall_shutdown_s) == (120, 240)
    assert any("--fusion-threshold-mb" in note for note in settings.notes)
    path.write_text("stall_check: {enabled: false}\n")
    assert read_settings({"np": "1"}, path).stall_warning_s == 0
    path.write_text("params: {fusion: 1}\n")
    with pytest.raises(OptionError, match="fusion"):
        read_settings({}, path)


def test_hosts_without_a_number_get_the_slots_per_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    text = dry_run(capsys, "-np", "2", "--slots-per-host", "4", "--host-discovery-script", str(script))
    assert "localhost:4" in text


@pytest.mark.parametrize("name", ["torchrun", "horovodrun"])
def test_ranks_have_their_place_by_the_others_names(name: str) -> None:
    placements = place_ranks(parse_hosts("a:2,b:1", "-H"), 3)
    (launcher,) = [launcher for launcher in LAUNCHERS if launcher.name == name]
    for place in placements:
        variables = peer_variables(place, 3, "10.0.0.1:5", "a")
        named = [getattr(launcher, field) for field in ("rank", "size", "local_rank", "local_size", "cross_rank")]
        expected = [place.rank, 3, place.local_rank, place.local_size, place.cross_rank]
        assert [int(variables[variable]) for variable in named] == expected
    assert variables["MASTER_ADDR"] == "a"
    assert 61440 <= int(variables["MASTER_PORT"]) < 65536


def test_the_users_own_store_stays() -> None:
    placements = place_ranks((Host(name="localhost", slots=1),), 1)
    job = rank_job(placements, ["true"], coordinator="h:1", meeting="h:2", environment={"MASTER_PORT": "29500"})
    variables = job.variables(job.processes[0], local=True)
    assert variables["MASTER_PORT"] == "29500"
    assert variables["SHARDWRIGHT_RANK"] == variables["RANK"] == variables["HOROVOD_RANK"] == "0"
