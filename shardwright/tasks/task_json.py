"""TaskGraph ↔ plain data for JSON: a graph of 96 stages and 512 micro-batches holds 300,000 tasks.

Tasks that differ only in their micro-batch share a `form`; a task is a row `[form, micro_batch, transfer]`, with null
in missing places. In forms a buffer is `[value, micro_batch]`: the value's position in `values`, and the micro-batch's
number, "own" (the task's), or null (the step's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from shardwright.clusters.links import Link
from shardwright.errors import PlanCheckError
from shardwright.json_reader import ObjectReader, is_count, is_number
from shardwright.tasks.graph import TASK_KINDS, Buffer, Task, TaskGraph

_OWN = "own"
_LISTS = ("reads", "writes", "donates", "frees")

Form = tuple[Any, ...]


def encode(graph: TaskGraph) -> dict[str, Any]:
    """The graph in plain lists, dicts, strings and numbers."""
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
        tuple((values.setdefault(b.value, len(values)), _relative(b, task)) for b in names) for names in lists
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


def decode(data: Any, path: str = "tasks") -> TaskGraph:
    """Read `encode`'s data, and check the graph. Raises PlanError naming the wrong field, under `path`."""
    reader = ObjectReader(data, path, refuse_unknown=True)
    values = reader.texts("values")
    forms = reader.objects("forms", lambda row: _read_form(row, values))
    graph = TaskGraph(
        schedule=reader.text("schedule"),
        micro_batches=reader.integer("micro_batches"),
        stages=_read_stages(reader, forms),
        sizes=tuple(
            _read_bytes(sizes, f"{path}.sizes[{number}]") for number, sizes in enumerate(reader.items("sizes"))
        ),
        sent_bytes=_read_bytes(reader.take("sent_bytes"), f"{path}.sent_bytes"),
        links=_read_links(reader),
    )
    reader.finish()
    try:
        graph.check()
    except PlanCheckError as error:
        raise error if error.where else PlanCheckError(error.message, where=path) from None
    return graph


#: (value, None or "own" or the number of a micro-batch)
FormBuffer = tuple[str, int | str | None]


def _read_form(row: ObjectReader, values: Sequence[str]) -> tuple[dict[str, Any], list[tuple[FormBuffer, ...]]]:
    kind = row.text("kind")
    if kind not in TASK_KINDS:
        raise row.wrong("kind", f"one of {', '.join(TASK_KINDS)}", kind)
    plain = {
        "kind": kind,
        "stage": row.integer("stage"),
        "chunk": None if row.take("chunk") is None else row.integer("chunk"),
        "program": row.text("program"),
        "peer": None if row.take("peer") is None else row.integer("peer"),
        "time_s": row.number("time_s"),
        "workspace_bytes": row.integer("workspace_bytes"),
    }
    return plain, [_read_buffers(row, name, values) for name in _LISTS]


def _read_buffers(row: ObjectReader, key: str, values: Sequence[str]) -> tuple[FormBuffer, ...]:
    buffers: list[FormBuffer] = []
    for item in row.items(key):
        if not isinstance(item, list) or len(item) != 2:
            raise row.wrong(key, "lists of a value and a micro-batch", item)
        place, number = item
        if not is_count(place) or place >= len(values):
            raise row.wrong(key, f"positions of values below {len(values)}", place)
        if number is not None and number != _OWN and not is_count(number):
            raise row.wrong(key, f'the number of a micro-batch, "{_OWN}" or null', number)
        buffers.append((values[place], number))
    return tuple(buffers)


def _read_stages(
    reader: ObjectReader, forms: Sequence[tuple[dict[str, Any], list[tuple[FormBuffer, ...]]]]
) -> tuple[tuple[Task, ...], ...]:
    known: dict[Buffer, Buffer] = {}

    def buffers(form: Sequence[FormBuffer], own: int | None) -> tuple[Buffer, ...]:
        named = (Buffer(value, own if number == _OWN else cast(int | None, number)) for value, number in form)
        return tuple(known.setdefault(buffer, buffer) for buffer in named)

    def task(row: Any) -> Task:
        if not isinstance(row, list) or len(row) != 3 or not is_count(row[0]) or row[0] >= len(forms):
            raise reader.wrong("stages", f"rows of a form below {len(forms)}, a micro-batch and a transfer", row)
        number, micro_batch, transfer = row
        if not all(entry is None or is_count(entry) for entry in (micro_batch, transfer)):
            raise reader.wrong("stages", "a micro-batch and a transfer as integers ≥ 0 or null", row)
        plain, lists = forms[number]
        reads, writes, donates, frees = (buffers(entries, micro_batch) for entries in lists)
        return Task(
            **plain, micro_batch=micro_batch, transfer=transfer, reads=reads, writes=writes, donates=donates,
            frees=frees,
        )  # fmt: skip

    stages = reader.items("stages")
    for rows in stages:
        if not isinstance(rows, list):
            raise reader.wrong("stages", "a list of tasks for each stage", rows)
    return tuple(tuple(task(row) for row in rows) for rows in stages)


def _read_bytes(data: Any, path: str) -> dict[str, int]:
    """Bytes by name."""
    reader = ObjectReader(data, path, refuse_unknown=True)
    return {name: reader.integer(name) for name in reader.names()}


def _read_links(reader: ObjectReader) -> dict[tuple[int, int], Link]:
    links: dict[tuple[int, int], Link] = {}
    for row in reader.items("links"):
        if not isinstance(row, list) or len(row) != 4 or not (is_count(row[0]) and is_count(row[1])):
            raise reader.wrong("links", "lists of two stages, a bandwidth and a latency", row)
        source, target, bandwidth, latency = row
        if not is_number(bandwidth) or bandwidth <= 0:
            raise reader.wrong("links", "a bandwidth above 0", bandwidth)
        if latency is not None and (not is_number(latency) or latency < 0):
            raise reader.wrong("links", "a latency ≥ 0 or null", latency)
        links[source, target] = Link(
            bandwidth_bytes_per_s=float(bandwidth), latency_s=None if latency is None else float(latency)
        )
    return links
