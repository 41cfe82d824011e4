"""TaskGraph ↔ plain data for JSON: a graph of 96 stages and 512 micro-batches holds 300,000 tasks.

Tasks that differ only in their micro-batch share a `form`; a task is a row `[form, micro_batch, transfer]`, with null
for what it has not. In forms a buffer is `[value, micro_batch]`: the value by its position in `values`, and the
micro-batch's number, "own" for that of the task, or null for the one of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.errors import PlanError
from shardwright.links import Link
from shardwright.tasks.graph import TASK_KINDS, Buffer, Task, TaskGraph

_OWN = "own"
_LISTS = ("reads", "writes", "donates", "frees")

Form = tuple[Any, ...]


def encode(graph: TaskGraph) -> dict[str, Any]:
    """The graph as plain lists, dicts, strings and numbers."""
    values: dict[str, int] = {}
    forms: dict[Form, int] = {}
    stages = [
        [[forms.setdefault(_form(task, values), len(forms)), task.micro_batch, task.transfer] for task in tasks]
        for tasks in graph.stages
    ]
    return {
        "schedule": graph.schedule,
        "micro_batches": graph.micro_batches,
        "values": list(values),
        "forms": [_form_data(form) for form in forms],
        "stages": stages,
        "sizes": [dict(sizes) for sizes in graph.sizes],
        "sent_bytes": dict(graph.sent_bytes),
        "links": [[*pair, link.bandwidth_bytes_per_s, link.latency_s] for pair, link in graph.links.items()],
    }


def _form(task: Task, values: dict[str, int]) -> Form:
    lists = (task.reads, task.writes, task.donates, task.frees)
    buffers = tuple(
        tuple((values.setdefault(b.value, len(values)), _relative(b, task)) for b in each) for each in lists
    )
    return (task.kind, task.stage, task.chunk, task.program, task.peer, task.time_s, task.workspace_bytes, *buffers)


def _relative(buffer: Buffer, task: Task) -> int | str | None:
    if buffer.micro_batch is None:
        return None
    return _OWN if buffer.micro_batch == task.micro_batch else buffer.micro_batch


def _form_data(form: Form) -> dict[str, Any]:
    kind, stage, chunk, program, peer, time_s, workspace_bytes, *lists = form
    plain = {
        "kind": kind, "stage": stage, "chunk": chunk, "program": program, "peer": peer, "time_s": time_s,
        "workspace_bytes": workspace_bytes,
    }  # fmt: skip
    return plain | {name: [list(b) for b in buffers] for name, buffers in zip(_LISTS, lists, strict=True)}


def decode(data: Any) -> TaskGraph:
    """Read `encode`'s data, and check the graph. Raises PlanError naming what is wrong."""
    try:
        graph = _decode(data)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PlanError(f"not a task graph: {type(error).__name__} {error}", where="tasks") from None
    graph.check()
    return graph


def _decode(data: Any) -> TaskGraph:
    values = [str(name) for name in data["values"]]
    known: dict[Buffer, Buffer] = {}
    forms = [_read_form(form, values) for form in data["forms"]]

    def buffers(form: Sequence[tuple[str, int | str | None]], own: int | None) -> tuple[Buffer, ...]:
        made = (Buffer(value, own if number == _OWN else _number(number)) for value, number in form)
        return tuple(known.setdefault(buffer, buffer) for buffer in made)

    def task(row: Any) -> Task:
        number, micro_batch, transfer = row
        plain, lists = forms[_count(number)]
        own = _number(micro_batch)
        reads, writes, donates, frees = (buffers(each, own) for each in lists)
        return Task(
            **plain, micro_batch=own, transfer=_number(transfer), reads=reads, writes=writes, donates=donates,
            frees=frees,
        )  # fmt: skip

    return TaskGraph(
        schedule=str(data["schedule"]),
        micro_batches=_count(data["micro_batches"]),
        stages=tuple(tuple(task(row) for row in rows) for rows in data["stages"]),
        sizes=tuple({str(name): _count(size) for name, size in sizes.items()} for sizes in data["sizes"]),
        sent_bytes={str(name): _count(size) for name, size in data["sent_bytes"].items()},
        links=dict(_read_link(*row) for row in data["links"]),
    )


def _read_form(form: Any, values: Sequence[str]) -> tuple[dict[str, Any], list[list[tuple[str, int | str | None]]]]:
    if form["kind"] not in TASK_KINDS:
        raise ValueError(f"kind {form['kind']!r}")
    plain = {
        "kind": form["kind"],
        "stage": _count(form["stage"]),
        "chunk": _number(form["chunk"]),
        "program": str(form["program"]),
        "peer": _number(form["peer"]),
        "time_s": float(form["time_s"]),
        "workspace_bytes": _count(form["workspace_bytes"]),
    }
    return plain, [[(values[_count(place)], number) for place, number in form[name]] for name in _LISTS]


def _read_link(source: Any, target: Any, bandwidth: Any, latency: Any) -> tuple[tuple[int, int], Link]:
    if not float(bandwidth) > 0:
        raise ValueError(f"bandwidth {bandwidth!r}")
    link = Link(bandwidth_bytes_per_s=float(bandwidth), latency_s=None if latency is None else float(latency))
    return (_count(source), _count(target)), link


def _number(value: Any) -> int | None:
    return None if value is None else _count(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
