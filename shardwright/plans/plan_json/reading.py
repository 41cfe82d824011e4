"""A plan from JSON, each field checked: `decode`, and its parts for plans of several programs."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar

from shardwright.errors import PlanError
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.json_reader import JsonProblem, ObjectReader, format_value, load_json
from shardwright.plans.attention_note import ATTENTION_KINDS, AttentionNote
from shardwright.plans.kernel_note import KERNEL_PRICES, KernelNote
from shardwright.plans.mixture_note import MIXTURE_PARTS, MixtureNote
from shardwright.plans.plan import (
    COLLECTIVE_KINDS,
    PLAN_FORMAT,
    SENT_AS,
    TEXT_LIMIT_BYTES,
    Candidate,
    CostSummary,
    InstructionPlan,
    MemorySummary,
    OptionValue,
    Plan,
    PlannedCollective,
    RecomputedSegment,
    SegmentPlan,
    VariablePlan,
)
from shardwright.plans.region_note import RegionNote
from shardwright.plans.shardings import Mesh, MeshAxis, TensorSharding, ValueSharding
from shardwright.plans.variable_strategy import VariableStrategy

T = TypeVar("T")


def decode(text: str, hlo_text: str | None = None) -> Plan:
    """Read `encode`'s JSON. Raises PlanError naming the wrong field, or if the plan was made for a program other than
    `hlo_text`.
    """
    return decode_data(read_json(text), hlo_text)


def read_json(text: str) -> Any:
    """The data of a JSON text; PlanError if it is none."""
    try:
        return load_json(text)
    except JsonProblem as problem:
        raise PlanError(
            f"not JSON: {problem}",
            where="plan",
            remedy="give a file that `shardwright plan --out` wrote, or the text of Plan.to_json",
        ) from None


def decode_data(data: Any, hlo_text: str | None = None) -> Plan:
    """`decode` on the data of the JSON text."""
    version = _read_version(data)
    if version < (1, 3):
        _add_later_fields(data)
    reader = ObjectReader(data, "plan", refuse_unknown=version <= version_of(PLAN_FORMAT))
    digest = read_digest(reader, "hlo_sha256")
    program_digest = read_digest(reader, "program_sha256") if reader.has("program_sha256") else ""
    original, own_text = _read_rewritten(reader, digest)
    if not original:
        own_text = read_own_text(reader, digest)
    if hlo_text is None or (original and digest_of(hlo_text) == original):
        hlo_text = own_text
    if hlo_text is not None and digest_of(hlo_text) != digest:
        raise PlanError(
            "the HLO text is not the program this plan was made for",
            where="plan.hlo_sha256",
            remedy="pass the text the plan was made from, or plan this program again",
        )
    reader.take("format")
    return replace(_read_plan(reader, digest, original, hlo_text), program_sha256=program_digest)


def read_digest(reader: ObjectReader, name: str) -> str:
    digest = reader.text(name)
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise reader.wrong(name, "64 hexadecimal digits", digest)
    return digest


def read_own_text(reader: ObjectReader, digest: str) -> str | None:
    """The program's text in the JSON itself, if it is there."""
    if not reader.has("hlo_gzip_base64"):
        return None
    text = _unpack(reader)
    if digest_of(text) != digest:
        raise reader.wrong("hlo_gzip_base64", "the text that hlo_sha256 is of", "another")
    return text


def digest_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _read_rewritten(reader: ObjectReader, digest: str) -> tuple[str, str | None]:
    """(hash of the original text of a rewritten program, or ''; the planned program if present)."""
    if not reader.has("rewritten"):
        return "", None
    row = reader.object("rewritten")
    original = row.text("original_sha256")
    text = read_own_text(row, digest)
    row.finish()
    return original, text


def _unpack(row: ObjectReader) -> str:
    packed = row.text("hlo_gzip_base64")
    inflater = zlib.decompressobj(wbits=31)
    try:
        text = inflater.decompress(base64.b64decode(packed, validate=True), TEXT_LIMIT_BYTES).decode()
    except (ValueError, zlib.error):  # not base64, not ASCII, not UTF-8
        raise row.wrong("hlo_gzip_base64", "gzip-compressed UTF-8 in base64", packed) from None
    if not inflater.eof:
        raise row.wrong("hlo_gzip_base64", f"a whole text of at most {TEXT_LIMIT_BYTES >> 20} MiB", packed)
    return text


def _add_later_fields(data: dict[str, Any]) -> None:
    data.setdefault("segments", [])
    data.setdefault("recomputed", [])
    data.setdefault("micro_batches", 1)
    if isinstance(data.get("cost"), dict):
        data["cost"].setdefault("hidden_s", 0.0)
        data["cost"].setdefault("is_bounded", True)
    candidates = data.get("candidates")
    for candidate in candidates if isinstance(candidates, list) else ():
        if isinstance(candidate, dict):
            candidate.setdefault("name", "")


def _read_plan(reader: ObjectReader, digest: str, original: str, hlo_text: str | None) -> Plan:
    mesh = read_mesh(reader, "mesh")
    shardings = reader.objects("shardings", lambda row: read_sharding(row, mesh))
    values = _read_values(reader, shardings)
    cost, memory = reader.object("cost"), reader.object("memory")
    plan = Plan(
        module_name=reader.text("module_name"),
        hlo_sha256=digest,
        mesh=mesh,
        hardware=reader.text("hardware"),
        origin=reader.text("origin"),
        planning_s=reader.number("planning_s"),
        instructions=_read_instructions(reader, mesh, values),
        parameters=reader.objects("parameters", lambda row: read_variable(row, shardings, mesh)),
        outputs=reader.objects("outputs", lambda row: read_variable(row, shardings, mesh)),
        collectives=reader.objects("collectives", lambda row: _read_collective(row, mesh)),
        cost=CostSummary(
            compute_s=cost.number("compute_s"),
            communication_s=cost.number("communication_s"),
            hidden_s=cost.number("hidden_s"),
            is_bounded=cost.boolean("is_bounded"),
            lower_bound_s=cost.number("lower_bound_s"),
            bound_scope=cost.text("bound_scope"),
            transfers_s=cost.number("transfers_s") if cost.has("transfers_s") else 0.0,
        ),
        memory=MemorySummary(
            arguments_bytes=memory.integer("arguments_bytes"),
            outputs_bytes=memory.integer("outputs_bytes"),
            temporaries_bytes=memory.integer("temporaries_bytes"),
            constants_bytes=memory.integer("constants_bytes") if memory.has("constants_bytes") else 0,
            **read_host_memory(memory),
        ),
        candidates=reader.objects("candidates", _read_candidate),
        segments=reader.objects("segments", lambda row: _read_segment(row, shardings)),
        recomputed=reader.objects("recomputed", _read_recomputed),
        micro_batches=reader.integer("micro_batches", least=1),
        compile_options=_read_options(reader),
        strategies=read_strategies(reader),
        attention=read_attention(reader),
        manual_axes=_read_manual_axes(reader),
        regions=reader.objects("regions", _read_region_note) if reader.has("regions") else (),
        kernels=reader.objects("kernels", _read_kernel_note) if reader.has("kernels") else (),
        mixtures=reader.objects("mixtures", _read_mixture_note) if reader.has("mixtures") else (),
        notes=reader.texts("notes"),
        original_sha256=original,
        hlo_text=hlo_text,
    )
    for part in (cost, memory, reader):
        part.finish()
    _check_numbers(plan.parameters, plan.outputs)
    return plan


def _read_options(reader: ObjectReader) -> dict[str, OptionValue]:
    if not reader.has("compile_options"):
        return {}
    options = reader.object("compile_options")
    return {name: _read_option(options, name) for name in options.names()}


def _read_option(options: ObjectReader, name: str) -> OptionValue:
    value = options.take(name)
    if not isinstance(value, bool | int | str):
        raise options.wrong(name, "true, false, a whole number or text", value)
    return value


def read_strategies(reader: ObjectReader) -> dict[str, VariableStrategy]:
    """The strategies of a plan's variables. Raises PlanError naming the wrong field."""
    if not reader.has("strategies"):
        return {}
    rows = reader.object("strategies")
    return {name: _read_strategy(rows.object(name)) for name in rows.names()}


def _read_strategy(row: ObjectReader) -> VariableStrategy:
    split = row.take("split")
    strategy = VariableStrategy(
        split=None if split is None else row.integer("split"),
        local_copy=row.boolean("local_copy") if row.has("local_copy") else False,
    )
    row.finish()
    return strategy


def _read_manual_axes(reader: ObjectReader) -> dict[str, tuple[str, ...]]:
    if not reader.has("manual_axes"):
        return {}
    rows = reader.object("manual_axes")
    return {name: rows.texts(name) for name in rows.names()}


def _read_region_note(row: ObjectReader) -> RegionNote:
    return RegionNote(
        place=row.text("place"),
        count=row.integer("count", least=1),
        axes=row.text("axes"),
        collectives=row.integer("collectives"),
        wire_bytes=row.integer("wire_bytes"),
        time_s=row.number("time_s"),
    )


def read_attention(reader: ObjectReader) -> tuple[AttentionNote, ...]:
    """The notes of a plan's attention. Raises PlanError naming the wrong field."""
    return reader.objects("attention", _read_attention_note) if reader.has("attention") else ()


def _read_attention_note(row: ObjectReader) -> AttentionNote:
    kind = row.text("kind")
    if kind not in ATTENTION_KINDS:
        raise row.wrong("kind", f"one of {', '.join(ATTENTION_KINDS)}", kind)
    return AttentionNote(
        place=row.text("place"),
        count=row.integer("count", least=1),
        kind=kind,
        words=row.text("words"),
        saved_bytes=row.integer("saved_bytes"),
        saved_s=row.number("saved_s"),
        replaced=row.boolean("replaced"),
        reason=row.text("reason"),
    )


def _read_kernel_note(row: ObjectReader) -> KernelNote:
    price = row.text("price")
    if price not in KERNEL_PRICES:
        raise row.wrong("price", f"one of {', '.join(map(repr, KERNEL_PRICES))}", price)
    return KernelNote(
        place=row.text("place"),
        name=row.text("name"),
        count=row.integer("count", least=1),
        whole=row.boolean("whole"),
        price=price,
        step_share=row.number("step_share"),
        memory_share=row.number("memory_share"),
    )


def _read_mixture_note(row: ObjectReader) -> MixtureNote:
    part = row.text("part")
    if part not in MIXTURE_PARTS:
        raise row.wrong("part", f"one of {', '.join(MIXTURE_PARTS)}", part)
    return MixtureNote(
        part=part,
        mixtures=row.integer("mixtures"),
        rows=row.integer("rows"),
        time_s=row.number("time_s"),
        wire_bytes=row.integer("wire_bytes"),
        flops=row.number("flops"),
    )


def version_of(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _read_version(data: Any) -> tuple[int, int]:
    if not isinstance(data, dict):
        raise PlanError(f"expected an object, found {format_value(data)}", where="plan")
    written = data.get("format")
    if not isinstance(written, str) or not re.fullmatch(r"\d{1,6}\.\d{1,6}", written):
        raise PlanError(
            f'expected a version such as "{PLAN_FORMAT}", found {format_value(written)}', where="plan.format"
        )
    if version_of(written)[0] != version_of(PLAN_FORMAT)[0]:
        raise PlanError(
            f"the plan has format {written}; this version of Shardwright reads {version_of(PLAN_FORMAT)[0]}.x",
            where="plan.format",
            remedy="plan the program again, or use the version of Shardwright that wrote it",
        )
    return version_of(written)


def read_mesh(reader: ObjectReader, key: str) -> Mesh:
    axes = reader.objects(key, lambda row: MeshAxis(name=row.text("name"), size=row.integer("size", least=1)))
    try:
        return Mesh(axes=axes)
    except PlanError as error:
        raise reader.wrong(key, "distinct axis names", error.message) from None


def read_sharding(row: ObjectReader, mesh: Mesh) -> TensorSharding:
    names = set(mesh.sizes)
    dims = row.items("dims")
    for axes in dims:
        if not isinstance(axes, list) or any(not isinstance(axis, str) or axis not in names for axis in axes):
            raise row.wrong("dims", f"lists of axes among {', '.join(sorted(names))}", axes)
    unreduced = row.texts("unreduced", among=tuple(mesh.sizes)) if row.has("unreduced") else ()
    return TensorSharding(tuple(tuple(axes) for axes in dims), unreduced)


def _read_values(reader: ObjectReader, shardings: Sequence[TensorSharding]) -> tuple[ValueSharding, ...]:
    values = []
    for i, row in enumerate(reader.items("values")):
        if not isinstance(row, list) or any(type(at) is not int or not 0 <= at < len(shardings) for at in row):
            raise reader.wrong(f"values[{i}]", f"positions below {len(shardings)}", row)
        values.append(tuple(shardings[at] for at in row))
    return tuple(values)


def _read_instructions(
    reader: ObjectReader, mesh: Mesh, values: Sequence[ValueSharding]
) -> tuple[InstructionPlan, ...]:
    computations, opcodes, reasons = (reader.texts(key) for key in ("computations", "opcodes", "reasons"))
    axes = set(mesh.sizes)

    def position(at: Any, table: Sequence[T]) -> T:
        if type(at) is not int or not 0 <= at < len(table):
            raise ValueError(f"a position below {len(table)}, found {format_value(at)}")
        return table[at]

    def instruction(row: Any) -> InstructionPlan:
        if not isinstance(row, list) or len(row) not in (7, 8):
            raise ValueError(f"a list of 7 or 8, found {format_value(row)}")
        computation, name, opcode, operands, result, partial, reason, *shared = row
        if not isinstance(name, str):
            raise ValueError(f"a name, found {format_value(name)}")
        if not isinstance(operands, list):
            raise ValueError(f"a list of operands, found {format_value(operands)}")
        if not isinstance(partial, list) or any(axis not in axes for axis in partial if isinstance(axis, str)):
            raise ValueError(f"a list of mesh axes, found {format_value(partial)}")
        if any(not isinstance(axis, str) for axis in partial) or len(set(partial)) != len(partial):
            raise ValueError(f"a list of distinct mesh axes, found {format_value(partial)}")
        return InstructionPlan(
            computation=position(computation, computations),
            name=name,
            opcode=position(opcode, opcodes),
            operands=tuple(position(operand, values) for operand in operands),
            result=position(result, values),
            partial=tuple(partial),
            reason=position(reason, reasons),
            shared=position(shared[0], values) if shared else (),
        )

    rows = []
    for i, row in enumerate(reader.items("instructions")):
        try:
            rows.append(instruction(row))
        except ValueError as error:
            raise PlanError(f"expected {error}", where=f"plan.instructions[{i}]") from None
    return tuple(rows)


def read_host_memory(memory: ObjectReader) -> dict[str, int]:
    """What lies in the memory of the host, where something does."""
    fields = ("host_arguments_bytes", "host_outputs_bytes", "host_temporaries_bytes", "host_limit_bytes")
    return {name: memory.integer(name) for name in fields if memory.has(name)}


def read_variable(row: ObjectReader, shardings: Sequence[TensorSharding], mesh: Mesh) -> VariablePlan:
    element_type = row.text("element_type")
    if element_type not in ELEMENT_BITS:
        raise row.wrong("element_type", "an HLO element type", element_type)
    alias = row.take("alias")
    shape, sharding = row.integers("shape"), row.entry("sharding", shardings)
    if len(sharding.dims) != len(shape):
        raise row.wrong("sharding", f"a sharding of {len(shape)} dimensions", str(sharding))
    variable = VariablePlan.from_sharding(
        row.integer("number"),
        row.text("name"),
        element_type,
        shape,
        sharding,
        mesh,
        alias=None if alias is None else row.integer("alias"),
        view_of=row.integers("view_of") if row.has("view_of") else None,
        is_on_host=row.boolean("is_on_host") if row.has("is_on_host") else False,
    )
    stored_shape = row.integers("stored_shape")
    if stored_shape != variable.stored_shape:
        raise row.wrong("stored_shape", f"{list(variable.stored_shape)} for this sharding", list(stored_shape))
    return variable


def _check_numbers(parameters: Sequence[VariablePlan], outputs: Sequence[VariablePlan]) -> None:
    for key, variables, others in (("parameters", parameters, outputs), ("outputs", outputs, parameters)):
        for i, variable in enumerate(variables):
            where = f"plan.{key}[{i}]"
            if variable.number != i:
                raise PlanError(f"expected number {i}, found {variable.number}", where=f"{where}.number")
            if variable.alias is not None and (
                variable.alias >= len(others) or others[variable.alias].alias != variable.number
            ):
                raise PlanError(f"alias {variable.alias} does not point back", where=f"{where}.alias")


def _read_collective(row: ObjectReader, mesh: Mesh) -> PlannedCollective:
    kind = row.text("kind")
    if kind not in COLLECTIVE_KINDS:
        raise row.wrong("kind", f"one of {', '.join(COLLECTIVE_KINDS)}", kind)
    sent_as = row.text("sent_as") if row.has("sent_as") else ""
    if sent_as not in SENT_AS:
        raise row.wrong("sent_as", f"one of {', '.join(filter(None, SENT_AS))}", sent_as)
    return PlannedCollective(
        kind=kind,
        axes=row.texts("axes", among=tuple(mesh.sizes)),
        instruction=row.text("instruction"),
        cause=row.text("cause"),
        payload_bytes=row.integer("payload_bytes"),
        wire_bytes=row.integer("wire_bytes"),
        count=row.integer("count"),
        time_s=row.number("time_s"),
        groups=_read_groups(row, mesh) if row.has("groups") else (),
        combined=row.integer("combined") if row.has("combined") else 0,
        sent_as=sent_as,
    )


def _read_groups(row: ObjectReader, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Groups of equal size, each device of the mesh in one of them."""
    groups = row.items("groups")
    devices = [device for group in groups if isinstance(group, list) for device in group]
    is_partition = all(type(device) is int for device in devices) and len(devices) == mesh.device_count
    if (
        not is_partition
        or sorted(devices) != list(range(mesh.device_count))
        or len({len(group) for group in groups}) != 1
    ):
        raise row.wrong("groups", f"lists of equal length that have each of {mesh.device_count} devices once", groups)
    return tuple(map(tuple, groups))


def _read_candidate(row: ObjectReader) -> Candidate:
    step_s = row.take("step_s")
    return Candidate(
        name=row.text("name"),
        mesh=read_mesh(row, "mesh"),
        step_s=None if step_s is None else row.number("step_s"),
        note=row.text("note"),
    )


def _read_recomputed(row: ObjectReader) -> RecomputedSegment:
    return RecomputedSegment(
        name=row.text("name"),
        repeats=row.integer("repeats", least=1),
        values=row.integer("values"),
        time_s=row.number("time_s"),
        saved_bytes=row.integer("saved_bytes"),
    )


def _read_segment(row: ObjectReader, shardings: Sequence[TensorSharding]) -> SegmentPlan:
    boundary = []
    for item in row.items("boundary"):
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str) or type(item[1]) is not int:
            raise row.wrong("boundary", "lists of an instruction and a position", item)
        if not 0 <= item[1] < len(shardings):
            raise row.wrong("boundary", f"positions below {len(shardings)}", item[1])
        boundary.append((item[0], shardings[item[1]]))
    return SegmentPlan(
        name=row.text("name"),
        kind=row.integer("kind"),
        instructions=row.integer("instructions"),
        repeats=row.integer("repeats", least=1),
        boundary=tuple(boundary),
    )
