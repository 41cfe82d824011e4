"""`shardwright run`: one command on many hosts, as ranks; the servers of a cluster; the doctor on every host."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.output import add_command, note, print_error
from shardwright.cli.tuning import SERVERS_END_S
from shardwright.errors import OptionError
from shardwright.package import VERSION

if TYPE_CHECKING:
    from shardwright.launch.hosts import Placement
    from shardwright.launch.job import Job
    from shardwright.launch.launcher import RunOptions
    from shardwright.launch.peer_options import Translation
    from shardwright.launch.settings import RunSettings

_EPILOG = """
The exit code is that of the first process that failed, 128 + n for signal n.
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "run",
        summary="start a command as ranks on many hosts",
        description="Start a command on many hosts, as ranks that find each other. The first that fails ends all.",
        examples=(
            "shardwright run -np 4 python train.py --epochs 3",
            "shardwright run -np 4 -H host1:2,host2:2 --output-dir logs python train.py",
            "shardwright run -H host1:2,host2:2 --check",
            "shardwright run --config run.yml",
            "shardwright run --min-np 2 --max-np 4 --host-discovery-script ./hosts.sh python train.py",
            "shardwright run --servers cluster.json",
            "shardwright run --servers cluster.json -- --drain-timeout 120",
        ),
    )
    assert parser.epilog is not None
    parser.epilog += _EPILOG
    parser.usage = "shardwright run [options] [--] COMMAND …"
    where = parser.add_argument_group("where")
    where.add_argument("-np", "--np", metavar="N", help="number of ranks (default: all slots of the hosts)")
    where.add_argument("-H", "--hosts", metavar="HOSTS", help="host1:2,host2:2, filled in this order (default: here)")
    where.add_argument("--hosts-file", metavar="FILE", help="the same in a file, `host slots=2` a line")
    where.add_argument("--config", metavar="FILE", help="options in YAML, by their long names; the command line wins")
    what = parser.add_argument_group("what")
    what.add_argument(
        "--servers",
        metavar="CLUSTER",
        help="start the servers of a cluster file instead of a command; their own options follow --",
    )
    what.add_argument("--check", action="store_true", help="run `shardwright doctor` on every host instead")
    what.add_argument("--dry-run", action="store_true", help="print the commands and environments, start nothing")
    what.add_argument(
        "-x", "--env", metavar="NAME[=VALUE]", action="append", help="a variable of all ranks; may repeat"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output-dir", metavar="DIR", help="write rank.N.stdout and rank.N.stderr there, too")
    output.add_argument("--timestamps", action="store_true", help="the time of day ahead of each line")
    output.add_argument("--timeline", metavar="FILE", help="write the collectives of all ranks as a Chrome trace")
    output.add_argument("--verbose", action="store_true", help="say what the launcher does")
    times = parser.add_argument_group("time")
    times.add_argument("--start-timeout", metavar="S", help="seconds for all hosts to answer (30)")
    times.add_argument(
        "--grace", metavar="S", help="seconds that ranks have to end after a signal to the launcher (10)"
    )
    times.add_argument(
        "--stall-warning", metavar="S", help="say which ranks others wait for after this long (60); 0: never"
    )
    times.add_argument("--stall-shutdown", metavar="S", help="end the job after such a wait (0: never)")
    elastic = parser.add_argument_group("ranks that come and go (sw.ranks.elastic)")
    elastic.add_argument("--min-np", metavar="N", help="go on while there are this many ranks (1)")
    elastic.add_argument("--max-np", metavar="N", help="take no more than this many (default: -np, or all slots)")
    elastic.add_argument("--host-discovery-script", metavar="FILE", help="prints `host:slots` lines; run once a second")
    elastic.add_argument(
        "--hang-timeout", metavar="S", help="end a rank that is not heard for this long (60; 0: never)"
    )
    elastic.add_argument("--elastic-timeout", metavar="S", help="seconds to wait while ranks are too few (600)")
    elastic.add_argument("--host-failures", metavar="N", help="failures in a row until a host is left out (3)")
    elastic.add_argument("--host-cooldown", metavar="S", help="seconds until it gets one more try (default: never)")
    elastic.add_argument("--reset-limit", metavar="N", help="end the job after this many new generations")
    ssh = parser.add_argument_group("other hosts")
    ssh.add_argument("-p", "--ssh-port", metavar="PORT", help="port of ssh")
    ssh.add_argument("-i", "--ssh-identity", metavar="FILE", help="private key")
    ssh.add_argument("--ssh-option", metavar="NAME=VALUE", action="append", help="as in ssh_config; may repeat")
    ssh.add_argument(
        "--coordinator-address",
        metavar="ADDRESS[:PORT]",
        help="address of this machine that the hosts reach (found by itself)",
    )
    _add_peer_options(parser)
    parser.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER, help="the command and its arguments")
    parser.set_defaults(run=run, parser=parser)


def _add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Options of `horovodrun` and `torchrun`, which `--help` leaves to docs/run.md."""
    from shardwright.launch.peer_options import PEER_OPTIONS

    version = f"shardwright {VERSION}"
    parser.add_argument("-v", "--version", action="version", version=version, help=argparse.SUPPRESS)
    parser.add_argument("-cb", "--check-build", action=_CheckBuild, nargs=0, help=argparse.SUPPRESS)
    for option in PEER_OPTIONS:
        parser.add_argument(
            *option.flags,
            dest=f"peer {option.key}",
            help=argparse.SUPPRESS,
            **(
                {"action": "store_true"}
                if option.values == 0
                else {"nargs": option.values}
                if option.values > 1
                else {}
            ),
        )


class _CheckBuild(argparse.Action):
    """`horovodrun --check-build`: what this installation runs on."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from importlib.util import find_spec

        lines = [f"shardwright {VERSION}", "collectives: XLA's (Gloo on CPUs, NCCL or RCCL on GPUs); no MPI"]
        for name in ("jax", "torch", "tensorflow", "keras"):
            lines.append(f"{name}: {'yes' if find_spec(name) else 'not installed'}")
        print("\n".join(lines))
        parser.exit()


def run(arguments: argparse.Namespace) -> int:
    """Start what is asked for, and return the exit code of the first process that failed."""
    from shardwright.launch.settings import read_settings

    given, peers = _given(arguments)
    if arguments.check and arguments.servers:
        arguments.parser.error("--check and --servers are two different things")
    options = list(given.pop("command", ())) if arguments.servers else []
    if ("command" in given and arguments.check) or (options and not options[0].startswith("-")):
        arguments.parser.error("--check and --servers take no command")
    if arguments.servers and given.keys() & {"np", "hosts", "hosts_file"}:
        arguments.parser.error("--servers takes its hosts from the cluster file: drop -np, -H and --hosts-file")
    config = arguments.config or peers.values.get("config")
    settings = read_settings(given, Path(config) if config else None, peers.notes)
    for line in settings.notes:
        note(f"shardwright run: {line}")
    if arguments.servers:
        return _run_servers(Path(arguments.servers), options, settings, dry_run=arguments.dry_run)
    if arguments.check:
        return _run_check(settings, dry_run=arguments.dry_run)
    if settings.is_elastic:
        return _run_elastic(settings, dry_run=arguments.dry_run)
    return _run_ranks(settings, dry_run=arguments.dry_run)


def _given(arguments: argparse.Namespace) -> tuple[dict[str, Any], Translation]:
    """The options on the command line, by their names in `settings.py`, and those of `horovodrun` and `torchrun`."""
    from shardwright.launch.peer_options import PEER_OPTIONS, translate
    from shardwright.launch.settings import OPTION_NAMES

    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    values = {name: getattr(arguments, name, None) for name in OPTION_NAMES if name != "command"}
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    peer_values = {option.key: getattr(arguments, f"peer {option.key}") for option in PEER_OPTIONS}
    has_hosts = bool(given.keys() & {"hosts", "hosts_file"} or peer_values["hostfile"])
    peers = translate(peer_values, has_hosts=has_hosts)
    given = {**{name: value for name, value in peers.values.items() if name != "config"}, **given}
    if peers.environment:
        given["env"] = [*[f"{name}={value}" for name, value in peers.environment.items()], *given.get("env", [])]
    if words and peers.as_module:
        words = ["python", "-m", *words]
    return ({**given, "command": words} if words else given), peers


def _run_ranks(settings: RunSettings, *, dry_run: bool) -> int:
    from shardwright.clusters.cluster import join_address
    from shardwright.launch.job import rank_job
    from shardwright.launch.launcher import ssh_of
    from shardwright.launch.meeting import MeetingPoint
    from shardwright.launch.service import CoordinationService, coordinator_host

    placements = _place(settings)
    command = _command(settings)
    hosts = {place.host.name: place.host for place in placements}.values()
    other_hosts = [host for host in hosts if ssh_of(host, settings.ssh) is not None]
    address, port = settings.coordinator_address or (coordinator_host(other_hosts, settings.ssh), 0)

    size, meeting_port = len(placements), port + 1 if port else 0

    def job_of(coordinator: str, meeting: str) -> Job:
        environment = _environment(settings)
        return rank_job(placements, command, coordinator=coordinator, meeting=meeting, environment=environment)

    if dry_run:
        ports = port or "PORT", meeting_port or "PORT"
        return _show(job_of(*[join_address(address, shown) for shown in ports]), settings)
    with (
        CoordinationService(address, size, port) as service,
        MeetingPoint(address, size, meeting_port, first=service) as meeting,
    ):
        if settings.verbose:
            note(f"shardwright run: the coordination service listens on {service.address}")
        return _run(job_of(service.address, meeting.address), settings)


def _command(settings: RunSettings) -> tuple[str, ...]:
    from shardwright.launch.job import resolve_command

    if not settings.command:
        example = "shardwright run -np 4 python train.py"
        raise OptionError("what shall run?", where="COMMAND", remedy=f"write it after the options: {example}")
    return resolve_command(settings.command)


def _environment(settings: RunSettings) -> dict[str, str]:
    """The variables of all ranks: the user's, and those that carry options to `sw.ranks.init`."""
    options = {
        "SHARDWRIGHT_STALL_WARNING_S": settings.stall_warning_s,
        "SHARDWRIGHT_STALL_SHUTDOWN_S": settings.stall_shutdown_s,
        "SHARDWRIGHT_TIMELINE": None if settings.timeline is None else settings.timeline.absolute(),
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    return {**given, **settings.environment}


def _run_elastic(settings: RunSettings, *, dry_run: bool) -> int:
    from shardwright.launch.discovery import file_source, fixed_source, script_source
    from shardwright.launch.elastic_launcher import ElasticOptions, elastic_failure, run_elastic
    from shardwright.launch.hosts import Host
    from shardwright.launch.job import mask_secret
    from shardwright.launch.tuning import FILE_INTERVAL_S, INTERVAL_S
    from shardwright.membership import Limits

    command = _command(settings)
    most = settings.max_size or settings.size
    look_interval_s = INTERVAL_S
    if settings.discovery_script:
        source = script_source(settings.discovery_script, settings.slots_per_host or 1)
    elif settings.hosts_file:
        source, look_interval_s = file_source(settings.hosts_file, settings.slots_per_host or 1), FILE_INTERVAL_S
    else:
        source = fixed_source(settings.hosts or (Host(name="localhost", slots=most or 1),))
    if dry_run:
        hosts = ", ".join(map(str, source())) or "none yet"
        print(f"{settings.min_size or 1} to {most or 'all slots of the hosts'} ranks, on {hosts} at present")
        print(f"  each: {shlex.join(command)}")
        for name, value in _environment(settings).items():
            print(f"    {name}={shlex.quote(mask_secret(name, value))}")
        return 0
    outcome = run_elastic(
        command,
        _environment(settings),
        _run_options(settings),
        ElasticOptions(
            limits=Limits(
                min_size=settings.min_size or 1,
                max_size=most,
                max_failures=settings.host_failures,
                cooldown_s=settings.host_cooldown_s,
            ),
            source=source,
            look_interval_s=look_interval_s,
            hang_timeout_s=settings.hang_timeout_s,
            elastic_timeout_s=settings.elastic_timeout_s,
            reset_limit=settings.reset_limit,
            coordinator_address=settings.coordinator_address[0] if settings.coordinator_address else "",
        ),
    )
    if failure := elastic_failure(outcome):
        print_error(failure)
    return outcome.exit_code


def _place(settings: RunSettings) -> tuple[Placement, ...]:
    from shardwright.launch.hosts import Host, place_ranks

    if settings.size is None and not settings.hosts:
        raise OptionError(
            "how many ranks?", where="-np", remedy="give -np 4, or hosts and their slots: -H host1:2,host2:2"
        )
    hosts = settings.hosts or (Host(name="localhost", slots=settings.size or 1),)
    return place_ranks(hosts, settings.size or sum(host.slots for host in hosts))


def _run_check(settings: RunSettings, *, dry_run: bool) -> int:
    from shardwright.launch.hosts import Host
    from shardwright.launch.job import check_job

    job = check_job(settings.hosts or (Host(name="localhost"),), settings.environment)
    return _show(job, settings) if dry_run else _run(job, settings)


def _run_servers(path: Path, options: list[str], settings: RunSettings, *, dry_run: bool) -> int:
    """Servers have as long to end as they take to drain, or longer."""
    from shardwright.launch.job import server_job
    from shardwright.server.options import check_server_options

    limits = check_server_options(options, "shardwright run --servers CLUSTER --")
    settings = replace(settings, grace_s=max(settings.grace_s, limits.drain_s + SERVERS_END_S))
    job = server_job(path, settings.environment, options)
    return _show(job, settings) if dry_run else _run(job, settings)


def _run(job: Job, settings: RunSettings) -> int:
    from shardwright.launch.launcher import failure_of, run_job

    outcome = run_job(job, _run_options(settings))
    if failure := failure_of(job, outcome):
        print_error(failure)
    return outcome.exit_code


def _run_options(settings: RunSettings) -> RunOptions:
    from shardwright.launch.launcher import RunOptions
    from shardwright.launch.output import descriptor_sink

    def say(text: str) -> None:
        note(f"shardwright run: {text}")

    return RunOptions(
        sinks={"stdout": descriptor_sink(1), "stderr": descriptor_sink(2)},
        ssh=settings.ssh,
        start_timeout_s=settings.start_timeout_s,
        grace_s=settings.grace_s,
        output_dir=settings.output_dir,
        timestamps=settings.timestamps,
        note=say if settings.verbose else lambda text: None,
        say=say,
    )


def _show(job: Job, settings: RunSettings) -> int:
    from shardwright.launch.dry_run import describe_job

    print(describe_job(job, settings.ssh, settings.start_timeout_s))
    return 0
