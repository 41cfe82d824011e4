"""What `shardwright status` shows: of one reply, as lines for a script or a log, as tables for a terminal, as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.cli.tuning import SILENCE_S
from shardwright.units import format_bytes, format_percent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from shardwright.proto.v1 import master_pb2, operators_pb2

#: Colours of states in tables.
_STYLES = {"ready": "green", "waiting": "yellow", "starting": "yellow", "draining": "yellow", "degraded": "yellow"}
#: Columns of tables that hold no numbers.
_TEXTS = ("session", "state", "client")
#: Letters of a session's name in a table.
_NAME_LETTERS = 12


def as_dict(reply: master_pb2.StatusReply) -> dict[str, Any]:
    return {
        "state": reply.state,
        "waiting_for": reply.waiting_for,
        "server_version": reply.server_version,
        "cluster": reply.cluster_name,
        "uptime_s": reply.uptime_s,
        "recovered_sessions": reply.recovered_sessions,
        "adopted_executors": reply.has_adopted,
        "planning": {"running": reply.planning.running, "waiting": reply.planning.waiting},
        "compiling": {"running": reply.compiling.running, "waiting": reply.compiling.waiting},
        "nodes": [
            {
                "index": each.node.index, "state": each.state, "generation": each.generation,
                "devices": each.node.device_count, "detail": each.detail,
                "executor_pid": each.executor_pid, "executor_exits": each.executor_exits,
                "daemon_silent_s": each.daemon_silent_s, "executor_silent_s": each.executor_silent_s,
                "memory_bytes": each.host.memory_bytes, "available_bytes": each.host.available_bytes,
                "snapshot_bytes": each.host.snapshot_bytes,
                "device_memory": [
                    {
                        "device": device.position, "used_bytes": device.used_bytes,
                        "limit_bytes": device.limit_bytes, "peak_bytes": device.peak_bytes,
                    }
                    for device in each.executor.devices
                ],
            }
            for each in reply.nodes
        ],
        "sessions": [
            {
                "session": each.session_id, "name": each.name, "owner": each.owner, "last_step": each.last_step,
                "arrays": each.array_count,
                "array_bytes": each.array_bytes, "programs": each.executable_count,
                "snapshot": each.snapshot, "snapshot_bytes": each.snapshot_bytes,
                "snapshot_age_s": each.snapshot_age_s, "running_steps": each.running_steps,
                "queued_steps": each.queued_steps, "steps_per_s": each.steps_per_s,
                "idle_s": each.idle_s, "connected": each.is_connected,
                "protected": each.protection.is_ready if each.HasField("protection") else None,
            }
            for each in reply.sessions
        ],
        "people": [
            {
                "person": each.name, "sessions": each.sessions, "session_limit": each.session_limit,
                "array_bytes": each.array_bytes, "array_limit_bytes": each.array_limit_bytes or None,
                "program_bytes": each.program_bytes, "program_limit_bytes": each.program_limit_bytes,
            }
            for each in reply.people
        ],
    }  # fmt: skip


# ---- lines ---------------------------------------------------------------------
def as_lines(reply: master_pb2.StatusReply) -> list[str]:
    lines = [f"{reply.cluster_name or 'cluster'}: {reply.state} (server {reply.server_version}, {reply.platform})"]
    if reply.waiting_for:
        lines.append(f"waiting for: {reply.waiting_for}")
    queues = _queues(reply)
    if queues:
        lines.append(queues)
    if reply.recovered_sessions:
        executors = "their executors as well" if reply.has_adopted else "on new executors"
        lines.append(f"recovered {reply.recovered_sessions} sessions of a master before, {executors}")
    lines += [_node_line(each) for each in reply.nodes]
    lines += [_session_line(each) for each in reply.sessions]
    lines += [_person_line(each) for each in reply.people]
    return lines


def _queues(reply: master_pb2.StatusReply) -> str:
    parts = [
        f"{what}: {queue.running} running, {queue.waiting} waiting"
        for what, queue in (("plans", reply.planning), ("compilations", reply.compiling))
        if queue.running or queue.waiting
    ]
    return "; ".join(parts)


def _node_line(status: master_pb2.NodeStatus) -> str:
    parts = [f"node {status.node.index}: {status.state}, {status.node.device_count} devices"]
    if status.executor.devices:
        parts.append(f"{_device_memory(status.executor)} on devices")
    if status.HasField("host"):
        free, all_of_it = format_bytes(status.host.available_bytes), format_bytes(status.host.memory_bytes)
        parts.append(f"{free} of {all_of_it} of the host free")
    if status.executor_exits:
        parts.append(f"{status.executor_exits} executors ended")
    return ", ".join(parts) + (f"  {status.detail}" if status.detail else "")


def _session_line(status: master_pb2.SessionStatus) -> str:
    held = f"{status.array_count} arrays, {format_bytes(status.array_bytes)}, {status.executable_count} programs"
    owner = f" of {status.owner}" if status.owner else ""
    name = f" ({status.name})" if status.name else ""
    parts = [f"session {status.session_id}{owner}{name}: step {status.last_step}, {held}"]
    if status.running_steps or status.queued_steps:
        parts.append(f"{status.running_steps} steps running, {status.queued_steps} waiting")
    if status.steps_per_s >= 0.01:
        parts.append(f"{status.steps_per_s:.3g} steps/s")
    if status.snapshot:
        size, age = format_bytes(status.snapshot_bytes), _age(status.snapshot_age_s)
        parts.append(f"snapshot of step {status.snapshot}, {size} in host memory, {age} old")
    if _lacks_protection(status):
        parts.append("not protected: until its next snapshot is complete, a loss of workers takes its arrays")
    if not status.is_connected:
        parts.append(f"no client, idle for {_age(status.idle_s)}")
    return "; ".join(parts)


def _person_line(person: master_pb2.PersonStatus) -> str:
    """Whom the limits of one person concern, and how far from them they are."""
    most = f" of {format_bytes(person.array_limit_bytes)}" if person.array_limit_bytes else ""
    programs = f"{format_bytes(person.program_bytes)} of {format_bytes(person.program_limit_bytes)} in programs"
    return (
        f"{person.name}: {person.sessions} of {person.session_limit} sessions, "
        f"{format_bytes(person.array_bytes)}{most} in arrays, {programs}"
    )


def _lacks_protection(status: master_pb2.SessionStatus) -> bool:
    """Whether a session takes snapshots, and yet would not survive a loss."""
    return status.HasField("protection") and not status.protection.is_ready


# ---- tables --------------------------------------------------------------------
def as_tables(reply: master_pb2.StatusReply) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    title = Text.assemble(
        (reply.cluster_name or "cluster", "bold"),
        "  ",
        (reply.state, _style(reply.state)),
        f"  server {reply.server_version}, {reply.platform}, up {_age(reply.uptime_s)}",
    )
    parts: list[RenderableType] = [title]
    if reply.waiting_for:
        parts.append(Text(f"waiting for: {reply.waiting_for}", style="yellow"))
    if queues := _queues(reply):
        parts.append(Text(queues))
    parts += [_node_table(reply), *_node_details(reply)]
    parts.append(_session_table(reply) if reply.sessions else Text("no sessions"))
    parts += [Text(_person_line(each)) for each in reply.people]
    return Group(*parts)


def _node_table(reply: master_pb2.StatusReply) -> RenderableType:
    from rich.text import Text

    table = _table("node", "state", "devices", "device memory", "host free", "snapshots", "restarts")
    for each in reply.nodes:
        free = f"{format_bytes(each.host.available_bytes)} of {format_bytes(each.host.memory_bytes)}"
        table.add_row(
            str(each.node.index),
            Text(each.state, style=_style(each.state)),
            str(each.node.device_count),
            _device_memory(each.executor),
            free if each.HasField("host") else "",
            format_bytes(each.host.snapshot_bytes) if each.host.snapshot_bytes else "",
            str(each.executor_exits),
        )
    return table


def _node_details(reply: master_pb2.StatusReply) -> list[RenderableType]:
    """Below the table: they are long."""
    from rich.text import Text

    details = []
    for each in reply.nodes:
        silent_s = max(each.daemon_silent_s, each.executor_silent_s)
        text = each.detail or (f"silent for {silent_s:.0f} s" if silent_s > SILENCE_S else "")
        if text:
            details.append(Text(f"node {each.node.index}: {text}", style="yellow"))
    return [*details]


def _session_table(reply: master_pb2.StatusReply) -> RenderableType:
    table = _table("session", "step", "steps/s", "run+wait", "arrays", "size", "snapshot", "client")
    for each in reply.sessions:
        table.add_row(
            " ".join(filter(None, (each.session_id, each.name[:_NAME_LETTERS], each.owner))),
            str(each.last_step),
            f"{each.steps_per_s:.3g}" if each.steps_per_s >= 0.01 else "0",
            f"{each.running_steps}+{each.queued_steps}",
            str(each.array_count),
            format_bytes(each.array_bytes),
            "not protected" if _lacks_protection(each) else _age(each.snapshot_age_s) if each.snapshot else "",
            "connected" if each.is_connected else f"away {_age(each.idle_s)}",
        )
    return table


def _table(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in _TEXTS else "right", no_wrap=True)
    return table


def _style(state: str) -> str:
    return _STYLES.get(state, "bold red")


def _device_memory(executor: operators_pb2.ExecutorFigures) -> str:
    """Of all devices together; with their limit, where the platform tells."""
    used, limit = (sum(getattr(each, name) for each in executor.devices) for name in ("used_bytes", "limit_bytes"))
    if not executor.devices:
        return ""
    return format_bytes(used) + (f" ({format_percent(used / limit)})" if limit else "")


def _age(seconds: float) -> str:
    """`12 s`, `3 min`, `2.5 h`, `4.0 d`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
