"""A plan in plain data for JSON: `encode`, and its parts for plans of several programs."""

from __future__ import annotations

import base64
import zlib
from dataclasses import asdict
from typing import Any

from shardwright.plans.plan import PLAN_FORMAT, MemorySummary, Plan, PlannedCollective, SegmentPlan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding


class Table:
    """Distinct entries in order of first use, and the position of each."""

    def __init__(self) -> None:
        self._positions: dict[Any, int] = {}

    def position(self, entry: Any) -> int:
        return self._positions.setdefault(entry, len(self._positions))

    @property
    def entries(self) -> list[Any]:
        return list(self._positions)


def encode(plan: Plan, *, with_text: bool = False) -> dict[str, Any]:
    """The plan in plain lists, dicts, strings and numbers; without its HLO text, unless that is a rewritten program's
    or asked for.
    """
    shardings, values, computations, opcodes, reasons = (Table() for _ in range(5))
    reasons.position("")
    rows = [
        [
            computations.position(entry.computation),
            entry.name,
            opcodes.position(entry.opcode),
            [values.position(operand) for operand in entry.operands],
            values.position(entry.result),
            list(entry.partial),
            reasons.position(entry.reason),
            *([values.position(entry.shared)] if entry.shared else []),
        ]
        for entry in plan.instructions
    ]
    value_rows = [[shardings.position(leaf) for leaf in value] for value in values.entries]
    parameters = [encode_variable(variable, shardings) for variable in plan.parameters]
    outputs = [encode_variable(variable, shardings) for variable in plan.outputs]
    segments = [_encode_segment(segment, shardings) for segment in plan.segments]
    program: dict[str, Any] = {"program_sha256": plan.program_sha256} if plan.program_sha256 else {}
    if plan.original_sha256:
        program["rewritten"] = {"original_sha256": plan.original_sha256, **encode_text(plan.hlo_text)}
    elif with_text:
        program |= encode_text(plan.hlo_text)
    return {
        "format": PLAN_FORMAT,
        "module_name": plan.module_name,
        "hlo_sha256": plan.hlo_sha256,
        **program,
        "mesh": encode_mesh(plan.mesh),
        "hardware": plan.hardware,
        "origin": plan.origin,
        "planning_s": plan.planning_s,
        "cost": {
            "compute_s": plan.cost.compute_s,
            "communication_s": plan.cost.communication_s,
            "hidden_s": plan.cost.hidden_s,
            "is_bounded": plan.cost.is_bounded,
            "lower_bound_s": plan.cost.lower_bound_s,
            "bound_scope": plan.cost.bound_scope,
            **({"transfers_s": plan.cost.transfers_s} if plan.cost.transfers_s else {}),
        },
        "memory": {
            "arguments_bytes": plan.memory.arguments_bytes,
            "outputs_bytes": plan.memory.outputs_bytes,
            "temporaries_bytes": plan.memory.temporaries_bytes,
            **({"constants_bytes": plan.memory.constants_bytes} if plan.memory.constants_bytes else {}),
            **encode_host_memory(plan.memory),
        },
        "candidates": [
            {
                "name": candidate.name,
                "mesh": encode_mesh(candidate.mesh),
                "step_s": candidate.step_s,
                "note": candidate.note,
            }
            for candidate in plan.candidates
        ],
        "segments": segments,
        "recomputed": [asdict(segment) for segment in plan.recomputed],
        "micro_batches": plan.micro_batches,
        **({"compile_options": dict(plan.compile_options)} if plan.compile_options else {}),
        **({"strategies": _encode_strategies(plan)} if plan.strategies else {}),
        **({"attention": [asdict(note) for note in plan.attention]} if plan.attention else {}),
        **({"manual_axes": {name: list(axes) for name, axes in plan.manual_axes.items()}} if plan.manual_axes else {}),
        **({"regions": [asdict(note) for note in plan.regions]} if plan.regions else {}),
        **({"kernels": [asdict(note) for note in plan.kernels]} if plan.kernels else {}),
        **({"mixtures": [asdict(note) for note in plan.mixtures]} if plan.mixtures else {}),
        "notes": list(plan.notes),
        "parameters": parameters,
        "outputs": outputs,
        "collectives": [_encode_collective(collective) for collective in plan.collectives],
        "shardings": [encode_sharding(sharding) for sharding in shardings.entries],
        "values": value_rows,
        "computations": computations.entries,
        "opcodes": opcodes.entries,
        "reasons": reasons.entries,
        "instructions": rows,
    }


def encode_text(hlo_text: str | None) -> dict[str, str]:
    """A program's text, if it is there, as a field."""
    if hlo_text is None:
        return {}
    packer = zlib.compressobj(level=6, wbits=31)
    packed = packer.compress(hlo_text.encode()) + packer.flush()
    return {"hlo_gzip_base64": base64.b64encode(packed).decode()}


def _encode_strategies(plan: Plan) -> dict[str, Any]:
    return {name: asdict(strategy) for name, strategy in plan.strategies.items()}


def encode_mesh(mesh: Mesh) -> list[dict[str, Any]]:
    return [{"name": axis.name, "size": axis.size} for axis in mesh.axes]


def encode_sharding(sharding: TensorSharding) -> dict[str, Any]:
    row: dict[str, Any] = {"dims": [list(axes) for axes in sharding.dims]}
    if sharding.unreduced:
        row["unreduced"] = list(sharding.unreduced)
    return row


def encode_host_memory(memory: MemorySummary) -> dict[str, int]:
    """What lies in the memory of the host, where something does."""
    if not memory.host_bytes:
        return {}
    return {
        "host_arguments_bytes": memory.host_arguments_bytes,
        "host_outputs_bytes": memory.host_outputs_bytes,
        "host_temporaries_bytes": memory.host_temporaries_bytes,
        "host_limit_bytes": memory.host_limit_bytes,
    }


def encode_variable(variable: VariablePlan, shardings: Table) -> dict[str, Any]:
    row: dict[str, Any] = {
        "number": variable.number,
        "name": variable.name,
        "element_type": variable.element_type,
        "shape": list(variable.shape),
        "sharding": shardings.position(variable.sharding),
        "stored_shape": list(variable.stored_shape),
        "alias": variable.alias,
    }
    if variable.view_of is not None:
        row["view_of"] = list(variable.view_of)
    if variable.is_on_host:
        row["is_on_host"] = True
    return row


def _encode_segment(segment: SegmentPlan, shardings: Table) -> dict[str, Any]:
    return {
        "name": segment.name,
        "kind": segment.kind,
        "instructions": segment.instructions,
        "repeats": segment.repeats,
        "boundary": [[name, shardings.position(sharding)] for name, sharding in segment.boundary],
    }


def _encode_collective(collective: PlannedCollective) -> dict[str, Any]:
    return {
        "kind": collective.kind,
        "axes": list(collective.axes),
        "instruction": collective.instruction,
        "cause": collective.cause,
        "payload_bytes": collective.payload_bytes,
        "wire_bytes": collective.wire_bytes,
        "count": collective.count,
        "time_s": collective.time_s,
        **({"groups": [list(group) for group in collective.groups]} if collective.groups else {}),
        **({"combined": collective.combined} if collective.combined else {}),
        **({"sent_as": collective.sent_as} if collective.sent_as else {}),
    }
