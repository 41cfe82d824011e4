"""The thin shell around `elastic_supervision.py`: hosts, the control line, a coordination service a generation."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import LaunchError
from shardwright.launch import control
from shardwright.launch.control import ControlServer
from shardwright.launch.discovery import Discovery
from shardwright.launch.elastic_supervision import (
    Dismiss,
    ElasticAction,
    ElasticEvent,
    ElasticSupervisor,
    FormGeneration,
    HostsDiscovered,
    RanksStalled,
    TellChanged,
    TellLost,
    WorkerReady,
    WorkerSilent,
)
from shardwright.launch.hosts import Host, first_address
from shardwright.launch.job import Job, ProcessSpec, rank_variables, without_chosen, working_directory
from shardwright.launch.launcher import Nodes, RunOptions, forward_signals, next_event, ssh_of
from shardwright.launch.output import JobOutput
from shardwright.launch.service import LOOPBACK, CoordinationService
from shardwright.launch.ssh import find_reachable_address
from shardwright.launch.supervision import (
    CloseNode,
    Finish,
    NodeLost,
    OpenNode,
    ProcessEnded,
    Say,
    SendSignal,
    SignalReceived,
    StartProcesses,
)
from shardwright.launch.tuning import DEFAULT_ELASTIC_TIMEOUT_S, DEFAULT_HANG_TIMEOUT_S, INTERVAL_S
from shardwright.membership import Limits
from shardwright.processes import describe_exit

#: JAX warns of every service that processes may come back to; a user's own level holds.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """What an elastic job is given besides RunOptions.

    limits: how many workers, and what happens to hosts that fail. source: looks for hosts. look_interval_s: from one
    look to the next. hang_timeout_s: after how long a worker that is not heard is ended, 0 for never.
    elastic_timeout_s: how long to wait while they are too few.
    coordinator_address: of this machine, as other hosts reach it; "" finds it.
    """

    limits: Limits
    source: Callable[[], tuple[Host, ...]]
    look_interval_s: float = INTERVAL_S
    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S
    elastic_timeout_s: float = DEFAULT_ELASTIC_TIMEOUT_S
    reset_limit: int | None = None
    coordinator_address: str = ""


def run_elastic(
    command: Sequence[str], environment: Mapping[str, str], options: RunOptions, elastic: ElasticOptions
) -> Finish:
    """Run a command as elastic ranks, to its end: afterwards nothing of it runs. Raises LaunchError, OptionError."""
    events: queue.SimpleQueue[ElasticEvent | _Note] = queue.SimpleQueue()
    output = JobOutput(
        (),
        options.sinks,
        directory=options.output_dir,
        timestamps=options.timestamps,
        on_broken_pipe=lambda: events.put(SignalReceived(signal.SIGPIPE)),
    )
    with contextlib.closing(output), forward_signals(events.put if options.take_signals else None):
        shell = _Shell(command, environment, options, elastic, output, events)
        try:
            return shell.run()
        finally:
            shell.close()


def elastic_failure(outcome: Finish) -> LaunchError | None:
    """What went wrong, in words; None after success, and where the user's signal ended the job."""
    if not outcome.reason:
        return None
    match outcome.failure:
        case ProcessEnded(worker, code, reason):
            last = f"worker {worker} {reason or 'ended with ' + describe_exit(code)}"
        case NodeLost(host, reason):
            last = f"{host}: {reason}"
        case _:
            last = "none failed"
    return LaunchError(
        f"the job ended after {outcome.after_s:.1f} s: {outcome.reason} (last failure: {last})",
        where="shardwright run",
        remedy="the failed ranks' last lines are above; hosts, -np and --min-np say who may take part",
    )


class _Shell:
    """One job's nodes, control line and services."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        options: RunOptions,
        elastic: ElasticOptions,
        output: JobOutput,
        events: queue.SimpleQueue[ElasticEvent | _Note],
    ) -> None:
        self._command = tuple(command)
        self._environment = environment
        self._directory = working_directory()
        self._options = options
        self._elastic = elastic
        self._output = output
        self._events = events
        self._nodes = Nodes(output, events.put, options)
        self._services: list[CoordinationService] = []
        self._silent: set[int] = set()
        self._control = ControlServer(self._on_message)
        self._discovery = Discovery(
            elastic.source,
            lambda hosts: events.put(HostsDiscovered(hosts)),
            lambda text: events.put(_Note(text)),
            elastic.look_interval_s,
        )
        self._supervisor = ElasticSupervisor(
            elastic.limits,
            start_timeout_s=options.start_timeout_s,
            elastic_timeout_s=elastic.elastic_timeout_s,
            grace_s=options.grace_s,
            reset_limit=elastic.reset_limit,
            now_s=time.monotonic(),
        )

    def run(self) -> Finish:
        self._discovery.start()
        while True:
            event = next_event(self._events, self._supervisor.deadline_s)
            if isinstance(event, _Note):
                self._options.say(event.text)
                continue
            if isinstance(event, ProcessEnded):
                self._control.forget(event.number)
            for happened in (event, *self._silent_workers()):
                for action in self._supervisor.handle(happened, time.monotonic()):
                    if isinstance(action, Finish):
                        return action
                    self._act(action)

    def close(self) -> None:
        self._discovery.close()
        self._nodes.close_all()
        self._control.close()
        for service in self._services:
            service.close()

    # ---- what happens ----
    def _on_message(self, worker: int, message: dict[str, Any]) -> None:
        if message["do"] == "ready":
            ready = WorkerReady(worker, lost=bool(message["lost"]), commits=int(message["commits"]))
            self._events.put(ready)
        elif message["do"] == "stalled":
            ranks = tuple(int(rank) for rank in message["ranks"])
            self._events.put(
                RanksStalled(int(message["generation"]), ranks, str(message["call"]), float(message["seconds"]))
            )

    def _silent_workers(self) -> list[WorkerSilent]:
        found: list[WorkerSilent] = []
        longest_s = self._elastic.hang_timeout_s
        for worker in self._supervisor.running - self._silent:
            silent_s = self._control.silent_for_s(worker)
            if silent_s is not None and 0 < longest_s < silent_s:
                self._silent.add(worker)
                found.append(WorkerSilent(worker, silent_s))
        return found

    # ---- what is done ----
    def _act(self, action: ElasticAction) -> None:
        match action:
            case Say(text):
                self._options.say(text)
            case OpenNode(name):
                self._nodes.open(self._supervisor.host_named(name))
            case CloseNode(name):
                self._nodes.close(name)
            case StartProcesses(numbers):
                for number in numbers:
                    self._start(number)
            case SendSignal(number, workers):
                self._nodes.send_signal(number, workers)
            case FormGeneration():
                self._form(action)
            case TellLost(generation, workers):
                self._tell(workers, do="lost", generation=generation)
            case TellChanged(workers):
                self._tell(workers, do="changed")
            case Dismiss(workers):
                self._tell(workers, do="leave")

    def _tell(self, workers: Sequence[int], **message: Any) -> None:
        for worker in workers:
            self._control.send(worker, **message)

    def _start(self, worker: int) -> None:
        host = self._supervisor.host_of(worker)
        process = ProcessSpec(
            number=worker,
            kind="worker",
            label=f"worker {worker}",
            host=host,
            command=self._command,
            environment={
                **_QUIET,
                control.ADDRESS_VARIABLE: self._control.address_at(self._address([host])),
                control.TOKEN_VARIABLE: self._control.token,
                control.WORKER_VARIABLE: str(worker),
            },
        )
        self._output.add((process,))
        job = Job(processes=(process,), directory=self._directory, environment=self._environment)
        self._nodes.start(job, (worker,))

    def _form(self, action: FormGeneration) -> None:
        """A service for the generation; that of the one before is asked by nobody any more."""
        hosts = [self._supervisor.host_of(worker) for worker in action.workers]
        service = CoordinationService(self._address(hosts), len(action.workers), elastic=True)
        for worker, place in zip(action.workers, action.places, strict=True):
            self._output.relabel(worker, str(place.rank))
            variables = rank_variables(
                place,
                len(action.workers),
                service.address,
                first_host=first_address(hosts),
                generation=action.generation,
            )
            self._control.send(worker, do="join", place=without_chosen(variables, chosen=self._environment))
        for old in self._services:
            old.close()
        self._services = [service]
        self._options.note(f"generation {action.generation} has {len(action.workers)} ranks")

    def _address(self, hosts: Sequence[Host]) -> str:
        """The address of this machine that these hosts reach: loopback, where all are this machine."""
        others = [host for host in hosts if ssh_of(host, self._options.ssh) is not None]
        if not others:
            return LOOPBACK
        return self._elastic.coordinator_address or find_reachable_address(others[0], self._options.ssh)


@dataclass(frozen=True, slots=True)
class _Note:
    """A line for the user, from a thread."""

    text: str
