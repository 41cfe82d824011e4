"""The event loop around `supervision.py`: starts a job's hosts, feeds events to the state machine, does its actions."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeVar

from shardwright.errors import LaunchError
from shardwright.launch import supervision as sv
from shardwright.launch.hosts import Host, is_this_machine
from shardwright.launch.job import Job
from shardwright.launch.node import Node, node_command
from shardwright.launch.output import JobOutput, Sink
from shardwright.launch.server_supervision import ServerSupervisor
from shardwright.launch.ssh import SshOptions
from shardwright.launch.tuning import CLOSE_TIMEOUT_S, DEFAULT_GRACE_S, DEFAULT_START_TIMEOUT_S, MAX_WAIT_S
from shardwright.membership import TimePassed
from shardwright.processes import describe_exit

_E = TypeVar("_E")

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of running a job.

    sinks: targets of `stdout` and `stderr`. ssh: for other hosts. start_timeout_s: for all hosts to answer. grace_s:
    from a forwarded signal to SIGKILL. output_dir, timestamps: see `JobOutput`. take_signals: forward the launcher's
    signals (from the main thread). note: called with lines of progress. say: with what the user should know.
    """

    sinks: Mapping[str, Sink]
    ssh: SshOptions = field(default_factory=SshOptions)
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    grace_s: float = DEFAULT_GRACE_S
    output_dir: Path | None = None
    timestamps: bool = False
    take_signals: bool = True
    note: Callable[[str], None] = lambda text: None
    say: Callable[[str], None] = lambda text: None


class Nodes:
    """The hosts of a job that are reached, by name. report: see `Node`."""

    def __init__(self, output: JobOutput, report: Callable[[sv.Event], None], options: RunOptions) -> None:
        self._output = output
        self._report = report
        self._options = options
        self._nodes: dict[str, Node] = {}
        self._is_local: dict[str, bool] = {}
        self._closing: list[Node] = []

    def open(self, host: Host) -> None:
        """Reach a host. Raises LaunchError without ssh."""
        ssh = ssh_of(host, self._options.ssh)  # it may ask for addresses: once a host
        command = node_command(host, ssh, self._options.start_timeout_s)
        self._nodes[host.name] = Node(host, command, self._output, self._report)
        self._is_local[host.name] = ssh is None

    def close(self, name: str) -> None:
        """Let go of a host; its agent ends what it runs."""
        if node := self._nodes.pop(name, None):
            node.begin_close()
            self._closing.append(node)

    def start(self, job: Job, numbers: Sequence[int]) -> None:
        """Start these processes of a job, each on its host."""
        for name, node in self._nodes.items():
            node.start(job, numbers, local=self._is_local[name])

    def send_signal(self, number: int, numbers: Sequence[int]) -> None:
        """See `Node.send_signal`."""
        for node in self._nodes.values():
            node.send_signal(number, numbers)

    def close_all(self) -> None:
        """End what still runs on hosts, all at once."""
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        for name in tuple(self._nodes):
            self.close(name)
        for node in self._closing:
            node.finish_close(until_s)


def run_job(job: Job, options: RunOptions) -> sv.Finish:
    """Run a job to the end of all of its processes. Raises LaunchError without ssh, OptionError for output_dir."""
    events: queue.SimpleQueue[sv.Event] = queue.SimpleQueue()
    output = JobOutput(
        job.processes,
        options.sinks,
        directory=options.output_dir,
        timestamps=options.timestamps,
        on_broken_pipe=lambda: events.put(sv.SignalReceived(signal.SIGPIPE)),
    )
    nodes = Nodes(output, events.put, options)
    with contextlib.closing(output), forward_signals(events.put if options.take_signals else None):
        supervisor = _make_supervisor(job, options)
        try:
            for host in job.hosts:
                nodes.open(host)
            return _supervise(job, supervisor, nodes, events, options)
        finally:
            nodes.close_all()


def _make_supervisor(job: Job, options: RunOptions) -> sv.Supervisor:
    hosts = {process.number: process.host.name for process in job.processes}
    start_timeout_s, grace_s, now_s = options.start_timeout_s, options.grace_s, time.monotonic()
    if job.restarts:
        return ServerSupervisor(
            hosts, may_shrink=job.may_shrink, start_timeout_s=start_timeout_s, grace_s=grace_s, now_s=now_s
        )
    return sv.Supervisor(hosts, start_timeout_s=start_timeout_s, grace_s=grace_s, fail_fast=job.fail_fast, now_s=now_s)


def failure_of(job: Job, outcome: sv.Finish) -> LaunchError | None:
    """The error of a failed job; None after success, or after the user's signal."""
    others = {0: "", 1: "; the other one was ended"}.get(
        outcome.ended_others, f"; the other {outcome.ended_others} were ended"
    )
    match outcome.failure:
        case sv.ProcessEnded(number, code, reason):
            process = next(process for process in job.processes if process.number == number)
            if reason:
                message = f"{process.description} cannot be started: {reason}"
                remedy = "program and folder have to be on every host, at the same paths"
            else:
                message = (
                    f"{process.description} ended with {describe_exit(code)} after {outcome.after_s:.1f} s{others}"
                )
                remedy = ""
            return LaunchError(message, where=process.host.name, remedy=remedy)
        case sv.NodeLost(host, reason):
            return LaunchError(f"{reason}{others}", where=host, remedy=_find_remedy(reason, host))
    return None


def _find_remedy(reason: str, host: str) -> str:
    if "Host key verification failed" in reason:
        return f"log in once by hand, and compare the key: ssh {host}"
    if "Permission denied" in reason:
        return "give a key that the host accepts (--ssh-identity), or load it with ssh-add: no password is asked for"
    if "exit code 127" in reason:
        return f"install the same environment there: {sys.executable} has to be on every host"
    return f"try: ssh -o BatchMode=yes {host} true"


def ssh_of(host: Host, ssh: SshOptions) -> SshOptions | None:
    """The ssh options of a host: None for this machine."""
    return None if is_this_machine(host.name) else ssh


def _supervise(
    job: Job, supervisor: sv.Supervisor, nodes: Nodes, events: queue.SimpleQueue[sv.Event], options: RunOptions
) -> sv.Finish:
    hosts = {host.name: host for host in job.hosts}
    while True:
        event = next_event(events, supervisor.deadline_s)
        if text := _describe(event):
            options.note(text)
        for action in supervisor.handle(event, time.monotonic()):
            match action:
                case sv.OpenNode(name):
                    nodes.open(hosts[name])
                case sv.CloseNode(name):
                    nodes.close(name)
                case sv.StartProcesses(numbers):
                    nodes.start(job, numbers)
                case sv.SendSignal(number, numbers):
                    options.note(f"{signal.Signals(number).name} to {len(numbers)} processes")
                    nodes.send_signal(number, numbers)
                case sv.Say(text):
                    options.say(text)
                case sv.Finish():
                    return action


def next_event(events: queue.SimpleQueue[_E], deadline_s: float | None) -> _E | TimePassed:
    """The next event; `TimePassed` at the deadline, and now and then, so that signals are seen."""
    wait_s = MAX_WAIT_S if deadline_s is None else min(MAX_WAIT_S, max(0.0, deadline_s - time.monotonic()))
    try:
        return events.get(timeout=wait_s)
    except queue.Empty:
        return TimePassed()


def _describe(event: sv.Event) -> str:
    match event:
        case sv.NodeReady(host):
            return f"{host} is ready"
        case sv.ProcessEnded(number, code):
            return f"process {number} ended with {code}"
        case sv.SignalReceived(number):
            return f"got {signal.Signals(number).name}"
        case _:
            return ""


@contextlib.contextmanager
def forward_signals(report: Callable[[sv.SignalReceived], None] | None) -> Iterator[None]:
    """Turn the launcher's signals into events within the block; signals ignored before stay ignored."""
    if report is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def put(number: int, frame: FrameType | None) -> None:
        report(sv.SignalReceived(number))

    before = {number: signal.getsignal(number) for number in (*_ENDING_SIGNALS, *sv.FORWARDED_SIGNALS)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, put)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
