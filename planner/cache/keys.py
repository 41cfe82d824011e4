"""Hashes of programs, options, clusters and the planner itself: what keys of kept work are made of."""

from __future__ import annotations

import dataclasses
import functools
import json
from array import array
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import shardwright
from shardwright.cluster import Cluster
from shardwright.config import IDENTITY_TARGETS, PlanOptions
from shardwright.hlo import Instruction, Module, format_shape
from shardwright.planner.gc_pause import gc_paused

#: What of a cluster decides no plan: names, addresses and who may connect.
_IGNORED_FIELDS = frozenset({"name", "security", "insecure", "token", "index", "ip", "port", "data_port", "gpu_ids"})

#: Names that the user gives to what is planned.
_NAMES = frozenset({"argument_names", "output_names"})

#: Attributes that say nothing of what is computed, and those that ask for a layout.
_METADATA = frozenset({"metadata"})
_SHARDING_ATTRIBUTES = frozenset({"sharding"})

#: Packages and modules that make plans: entries made by other versions of them are not found.
_SOURCES = (
    "planner", "cost", "hlo", "tasks", "config.py", "layouts.py", "links.toml", "pipeline_json.py", "pipelines.py",
    "plan_json", "plans.py", "shardings.py",
)  # fmt: skip


def program_digest(module: Module) -> bytes:
    """Hash of what a module computes: opcodes, shapes, attributes, constants and who reads whom, in text order.

    Left out: names of the module, of computations and instructions, metadata and the tables of source lines.
    """
    with gc_paused():
        kinds = _InstructionKinds(left_out=_METADATA)
        rows, _ = _encode_rows(module, kinds.number, lambda _: False)
        header = [(name, attribute.text) for name, attribute in sorted(module.header.items())]
        entry = list(module.computations).index(module.entry)
        return sha256(rows.tobytes() + hash_json([header, entry, kinds.texts])).digest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a program is besides what is asked of its layouts.

    steps: hash of the opcodes and of who reads whom: equal for the same program of other sizes. sizes: hash of the
    rest, such as shapes, attributes and constants. asked: what each annotation or sharding says, and of which value.
    """

    steps: bytes
    sizes: bytes
    pins: frozenset[str]


def build_outline(module: Module) -> Outline:
    """The outline of a module; annotations and sharding constraints count as what they are of."""
    with gc_paused():
        kinds = _InstructionKinds(left_out=_METADATA | _SHARDING_ATTRIBUTES)
        opcodes: dict[str, int] = {}
        rows, numbers = _encode_rows(module, lambda i: opcodes.setdefault(i.opcode, len(opcodes)), _is_annotation)
        each = [i for computation in module.computations for i in computation.instructions]
        sizes = array("q", [kinds.number(i) for i in each if not _is_annotation(i)])
        alias = module.header.get("input_output_alias")
        shape = [list(opcodes), alias.text if alias is not None else ""]
        return Outline(
            steps=sha256(rows.tobytes() + hash_json(shape)).digest(),
            sizes=sha256(sizes.tobytes() + hash_json(kinds.texts)).digest(),
            pins=frozenset(
                f"{numbers[i]} {i.get('backend_config') if _is_annotation(i) else None} {i.get('sharding')}"
                for i in each
                if _is_annotation(i) or i.get("sharding")
            ),
        )


def _is_annotation(instruction: Instruction) -> bool:
    return instruction.get("custom_call_target") in IDENTITY_TARGETS


def _encode_rows(
    module: Module, number: Callable[[Instruction], int], is_left_out: Callable[[Instruction], bool]
) -> tuple[array[int], dict[Instruction, int]]:
    """Every instruction as numbers: its kind, its operands, what it calls; and how instructions are numbered.

    One that is left out has the number of its first operand.
    """
    numbers: dict[Instruction, int] = {}
    computations = {computation: number for number, computation in enumerate(module.computations)}
    rows = array("q")
    count = 0
    for computation in module.computations:
        rows.append(-1)
        for instruction in computation.instructions:
            if is_left_out(instruction):
                numbers[instruction] = numbers[instruction.operands[0]]
                continue
            numbers[instruction] = count
            count += 1
            rows.append(number(instruction))
            rows.append(len(instruction.operands))
            rows.extend([numbers[operand] for operand in instruction.operands])
            for callees in instruction.called.values():
                rows.append(len(callees))
                rows.extend([computations[callee] for callee in callees])
        rows.append(numbers[computation.root])
    return rows, numbers


class _InstructionKinds:
    """Numbers for instructions that differ in their operands at most, in order of first use."""

    def __init__(self, *, left_out: frozenset[str]) -> None:
        self._ignored_attributes = left_out
        self._by_parts: dict[tuple[Any, ...], int] = {}  # attributes and shapes are interned: by identity
        self._by_text: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._by_text)

    def number(self, instruction: Instruction) -> int:
        attributes = [id(each) for name, each in instruction.attributes.items() if name not in self._ignored_attributes]
        parts = (instruction.opcode, id(instruction.shape), instruction.payload, instruction.index, *attributes)
        found = self._by_parts.get(parts)
        if found is None:
            text = json.dumps(
                [
                    instruction.opcode,
                    format_shape(instruction.shape),
                    instruction.payload,
                    instruction.index,
                    [name if name in instruction.called else f"{name}={each.text}"
                     for name, each in instruction.attributes.items() if name not in self._ignored_attributes],
                ]
            )  # fmt: skip
            found = self._by_parts[parts] = self._by_text.setdefault(text, len(self._by_text))
        return found


def options_digest(options: PlanOptions) -> bytes:
    """Hash of what was asked for. Names count where options refer to arguments by name."""
    left_out = frozenset() if isinstance(options.force, Mapping) else _NAMES
    return hash_json({field.name: _to_plain(getattr(options, field.name)) for field in dataclasses.fields(options)
                  if field.name not in left_out})  # fmt: skip


def cluster_digest(cluster: Cluster) -> bytes:
    """Hash of devices, hardware, memory and links; names, addresses and security do not count."""
    return hash_json(_to_plain(cluster))


@functools.cache
def planner_version() -> bytes:
    """Hash of the sources and data that make plans: put it into every key."""
    root = Path(shardwright.__file__).parent
    digest = sha256()
    for source in _SOURCES:
        path = root / source
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            if file.suffix in {".py", ".toml"}:
                digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.digest()


def _to_plain(value: Any) -> Any:
    """Dataclasses and mappings as sorted lists that JSON can hold."""
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.name not in _IGNORED_FIELDS]
        return [[name, _to_plain(getattr(value, name))] for name in fields]
    if isinstance(value, Mapping):
        return sorted(([_to_plain(key), _to_plain(each)] for key, each in value.items()), key=repr)
    if isinstance(value, (list, tuple)):
        return [_to_plain(each) for each in value]
    return value


def hash_json(data: Any) -> bytes:
    """Hash of anything that JSON can say; what it cannot, by its `str`."""
    return sha256(json.dumps(data, sort_keys=True, default=str).encode()).digest()
