"""Prometheus' metrics of a master and its cluster, read when somebody scrapes them; docs/operating.md has the table.

Nothing is counted here: the numbers are the master's own (`statistics.py`, `figures.py`, the state machine), and a
scrape reads them on the event loop. Labels are nodes, devices, kinds and results: none is a session's or a plan's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shardwright.errors import ServerUnavailableError
from shardwright.server.master import events as ev
from shardwright.server.master import node_reports, watchdog
from shardwright.server.master.statistics import RESULTS
from shardwright.server.tuning import SCRAPE_S
from shardwright.server.versions import jax_version, shardwright_version

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from shardwright.server.master.shell import Master
    from shardwright.server.master.statistics import Histogram, Work

#: States of the cluster, as Status has them.
STATES = ("waiting", "ready", "degraded", "stalled", "draining")
NODE_STATES = ("waiting", "starting", "ready", "lost")
STEP_KINDS = ("step", "save", "restore", "snapshot", "move")

_PREFIX = "shardwright_"


class MetricsEndpoint:
    """Serves them over HTTP at `host:port` until it is closed. Raises ServerUnavailableError where that is taken."""

    def __init__(self, master: Master, address: str) -> None:
        from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        registry.register(_OnLoop(master, asyncio.get_running_loop()))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        at = urlsplit(f"//{address}")
        try:
            self._server, self._thread = start_http_server(at.port or 0, at.hostname or "127.0.0.1", registry)
        except OSError as error:
            raise ServerUnavailableError(
                f"metrics cannot be served at {address}: {error.strerror or error}",
                where="--metrics-port",
                remedy="give another port, or an address of this machine",
            ) from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _OnLoop:
    """Prometheus' collector: asks the event loop, from the thread of a scrape."""

    def __init__(self, master: Master, loop: asyncio.AbstractEventLoop) -> None:
        self._master = master
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Nothing is collected when it is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        async def read() -> list[Metric]:
            return list(collect(self._master, self._loop.time()))

        yield from asyncio.run_coroutine_threadsafe(read(), self._loop).result(SCRAPE_S)


def collect(master: Master, now_s: float) -> Iterator[Metric]:
    """All metrics, as they are now."""
    return itertools.chain(
        _cluster(master, now_s), _steps(master), _work(master), _nodes(master), _devices(master), _logs(master)
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _gauges(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(_PREFIX + name, text, labels=labels), values)


def _counter(name: str, text: str, value: float) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(_PREFIX + name, text, value=value)


def _counters(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(_PREFIX + name, text, labels=labels), values)


def _filled(family: Metric, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)  # type: ignore[attr-defined]  # of those with labels
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    bounds = [*map(str, histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, map(float, itertools.accumulate(histogram.counts)), strict=True))
    return HistogramMetricFamily(_PREFIX + name, text, buckets=buckets, sum_value=histogram.sum)


# ---- what there is -------------------------------------------------------------
def _cluster(master: Master, now_s: float) -> Iterator[Metric]:
    state, formation = master.state, master.state.formation
    versions = (shardwright_version(), jax_version(), master.cluster.platform)
    yield _gauges("build_info", "Versions; always 1.", ("version", "jax_version", "platform"), [(versions, 1)])
    yield _gauge("uptime_seconds", "Since the master was started.", now_s - master.started_s)
    summary = watchdog.summarize(state)
    yield _gauges("state", "1 for the state that the cluster is in.", ("state",), _one_hot(STATES, [summary]))
    states = [node_reports.node_state(formation, node) for node in formation.nodes]
    yield _gauges("nodes", "Nodes in each state.", ("state",), _one_hot(NODE_STATES, states))
    yield _counter("generations", "Starts of all executors.", formation.generation)
    head = watchdog.head(state)
    age_s = 0.0 if head is None else watchdog.age_s(state, head)
    yield _gauge("oldest_command_seconds", "How long executors have been at what everybody waits for.", age_s)


def _one_hot(names: Iterable[str], values: list[str]) -> list[tuple[tuple[str], float]]:
    return [((name,), values.count(name)) for name in names]


def _steps(master: Master) -> Iterator[Metric]:
    state, statistics = master.state, master.state.statistics
    sessions = state.sessions.values()
    yield _gauge("sessions", "Open sessions.", len(sessions))
    connected = sum(session.stream is not None for session in sessions)
    yield _gauge("sessions_connected", "Sessions whose client has a stream of steps.", connected)
    yield _counter("sessions_opened", "Sessions so far.", statistics.sessions)
    values = [((kind, result), statistics.steps[kind, result]) for kind in STEP_KINDS for result in RESULTS]
    yield _counters("steps", "Numbered steps that ended.", ("kind", "result"), values)
    text = "What workers took for a step that ran a program, from dispatch to ready."
    yield _histogram("step_seconds", text, statistics.step_s)
    running = sum(len(session.running) for session in sessions)
    yield _gauge("steps_running", "Steps that executors have.", running)
    queues = [item.request for session in sessions for item in session.queue]
    waiting = sum(isinstance(request, ev.StepRequested) for request in queues)
    yield _gauge("steps_queued", "Steps that wait for arguments, programs or workers.", waiting)
    yield _gauge("arrays", "Arrays of all sessions.", sum(len(session.arrays) for session in sessions))
    held = sum(session.array_bytes for session in sessions)
    yield _gauge("array_bytes", "What they take, each counted once.", held)
    yield _counter("uploads", "Arrays that nodes were sent by clients.", statistics.uploads)
    yield _counter("upload_bytes", "What they take, each counted once a node.", statistics.upload_bytes)
    ages = [state.now_s - session.snapshots.completed_s for session in sessions if session.snapshots.complete]
    yield _gauge("snapshot_age_seconds", "Of the session whose newest is the oldest; 0: none.", max(ages, default=0.0))


def _work(master: Master) -> Iterator[Metric]:
    statistics, planners, compilers = master.state.statistics, master.planners, master.compile_queue
    yield _gauge("plans_running", "Plans that are being made.", planners.running)
    yield _gauge("plans_queued", "Plans that wait for a free core.", planners.waiting)
    yield _gauge("compilations_running", "Plans that are being compiled.", compilers.running)
    yield _gauge("compilations_queued", "Plans that wait to be compiled.", compilers.waiting)
    yield from _of_work("plans", "plan_seconds", "Plans", statistics.plans)
    yield from _of_work("compilations", "compilation_seconds", "Compilations of a plan", statistics.compilations)
    yield from _of_work("snapshots", "snapshot_seconds", "Snapshots", statistics.snapshots, "snapshot_bytes")
    yield from _of_work("saves", "save_seconds", "Checkpoints written", statistics.saves, "save_bytes")
    yield _counter("programs_uploaded", "Programs that clients sent.", statistics.programs)
    yield _counter("program_bytes", "What they took on the wire.", statistics.program_bytes)


def _of_work(name: str, seconds: str, what: str, work: Work, size: str = "") -> Iterator[Metric]:
    values = [((result,), work.results[result]) for result in RESULTS]
    yield _counters(name, f"{what}, by their end.", ("result",), values)
    yield _histogram(seconds, f"{what}: what those took that succeeded.", work.seconds)
    if size:
        yield _counter(size, f"{what}: bytes of those that succeeded.", work.bytes)


def _nodes(master: Master) -> Iterator[Metric]:
    formation, figures = master.state.formation, master.figures
    exits = master.state.statistics.executor_exits
    nodes = list(formation.nodes)

    def each(value: Callable[[int], float]) -> list[tuple[tuple[str], float]]:
        return [((str(node),), value(node)) for node in nodes]

    yield _counters("executor_exits", "Executors that ended.", ("node",), each(lambda node: exits[node]))
    silent = [
        ((str(node), process), pulse.silent_s)
        for node, record in formation.nodes.items()
        for process, pulse, is_there in (
            ("daemon", record.daemon_pulse, record.daemon is not None),
            ("executor", record.executor_pulse, record.executor_connection is not None),
        )
        if is_there
    ]
    yield _gauges("heartbeat_age_seconds", "Since a process was last heard.", ("node", "process"), silent)
    hosts = {node: figures.of(node).host for node in nodes}
    for name, field, text in (
        ("host_memory_bytes", "memory_bytes", "Memory of the node's machine."),
        ("host_memory_available_bytes", "available_bytes", "What of it programs may still take."),
        ("daemon_resident_bytes", "resident_bytes", "Memory of the daemon; on node 0 the master is in it."),
        ("snapshot_memory_bytes", "snapshot_bytes", "What snapshots take of it."),
        ("snapshot_memory_limit_bytes", "snapshot_limit_bytes", "What they may take."),
    ):
        samples = [((str(node),), float(getattr(host, field))) for node, host in hosts.items() if host is not None]
        yield _gauges(name, text, ("node",), samples)
    for name, field, text in (
        ("array_received_bytes", "received_bytes", "Array contents that clients sent to a node."),
        ("array_sent_bytes", "sent_bytes", "Array contents that a node sent to clients."),
        ("array_fetched_bytes", "fetched_bytes", "Pieces of arrays that a node's executor took from others."),
    ):
        yield _counters(name, text, ("node",), each(lambda node, field=field: figures.of(node).moved_bytes(field)))  # type: ignore[misc]


def _devices(master: Master) -> Iterator[Metric]:
    formation = master.state.formation
    executors = {
        node: executor
        for node, record in formation.nodes.items()
        if record.executor_connection is not None and (executor := master.figures.of(node).executor) is not None
    }
    resident = [((str(node),), float(executor.resident_bytes)) for node, executor in executors.items()]
    yield _gauges("executor_resident_bytes", "Host memory of the executor.", ("node",), resident)
    devices = [
        ((str(node), str(device.position)), device)
        for node, executor in executors.items()
        for device in executor.devices
    ]
    used = [(of, float(device.used_bytes)) for of, device in devices]
    text = "Memory in use on a device; on platforms that do not tell, what arrays take."
    yield _gauges("device_memory_used_bytes", text, ("node", "device"), used)
    limits = [(of, float(device.limit_bytes)) for of, device in devices if device.limit_bytes]
    yield _gauges("device_memory_limit_bytes", "What a device has for programs.", ("node", "device"), limits)
    peaks = [(of, float(device.peak_bytes)) for of, device in devices if device.peak_bytes]
    yield _gauges("device_memory_peak_bytes", "Most that was ever in use on it.", ("node", "device"), peaks)


def _logs(master: Master) -> Iterator[Metric]:
    values = []
    for node in sorted({0, *master.state.formation.nodes}):
        host = master.figures.of(node).host
        own = master.log.dropped if master.log is not None and node == 0 else 0
        values.append(((str(node),), float(own + (host.dropped_lines if host is not None else 0))))
    yield _counters("log_lines_dropped", "Lines of the log that nobody read in time.", ("node",), values)
