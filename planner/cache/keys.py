"""Cache keys: hashes of programs, options, clusters and the planner's sources."""

from __future__ import annotations

import dataclasses
import functools
import json
from array import array
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import Instruction, Module, format_shape
from shardwright.options.plan_options import PlanOptions
from shardwright.package import FOLDER
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.xla_version import xla_version
from shardwright.reserved_names import IDENTITY_TARGETS

#: Cluster fields without influence on plans: names, addresses, access control, inputs, how many nodes it needs.
_IGNORED_FIELDS = frozenset(
    {
        "name",
        "security",
        "insecure",
        "token",
        "dataset_modules",
        "index",
        "ip",
        "port",
        "data_port",
        "gpu_ids",
        "min_nodes",
        "max_nodes",
    }
)

#: User-given names of arguments and outputs.
_NAMES = frozenset({"argument_names", "output_names"})

#: Attributes without computational meaning, and those requesting a layout.
_METADATA = frozenset({"metadata"})
_SHARDING_ATTRIBUTES = frozenset({"sharding"})

#: Packages and modules of the planner; entries of other versions are not found.
SOURCES = (
    "attention", "clusters", "cost", "dtypes.py", "hlo", "kernels", "options", "placements", "planner", "plans",
    "regions", "reserved_names.py", "tasks",
)  # fmt: skip


def program_digest(module: Module) -> bytes:
    """Hash of a module's computation: opcodes, shapes, attributes, constants and dataflow, in text order.

    Excluded: names of the module, computations and instructions; metadata; source line tables.
    """
    with gc_paused():
        kinds = _InstructionKinds(left_out=_METADATA)
        rows, _ = _encode_rows(module, kinds.number, lambda _: False)
        header = [(name, attribute.text) for name, attribute in sorted(module.header.items())]
        entry = list(module.computations).index(module.entry)
        return sha256(rows.tobytes() + hash_json([header, entry, kinds.texts])).digest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A program apart from its requested layouts.

    steps: hash of opcodes and dataflow, equal across sizes.
    sizes: hash of the rest: shapes, attributes, constants.
    pins: content and target of each annotation or sharding.
    """

    steps: bytes
    sizes: bytes
    pins: frozenset[str]


def build_outline(module: Module) -> Outline:
    """The outline of a module; annotations and sharding constraints are identified with their operand."""
    with gc_paused():
        kinds = _InstructionKinds(left_out=_METADATA | _SHARDING_ATTRIBUTES)
        opcodes: dict[str, int] = {}
        rows, numbers = _encode_rows(module, lambda i: opcodes.setdefault(i.opcode, len(opcodes)), _is_annotation)
        instructions = [i for computation in module.computations for i in computation.instructions]
        sizes = array("q", [kinds.number(i) for i in instructions if not _is_annotation(i)])
        alias = module.header.get("input_output_alias")
        shape = [list(opcodes), alias.text if alias is not None else ""]
        return Outline(
            steps=sha256(rows.tobytes() + hash_json(shape)).digest(),
            sizes=sha256(sizes.tobytes() + hash_json(kinds.texts)).digest(),
            pins=frozenset(
                f"{numbers[i]} {i.get('backend_config') if _is_annotation(i) else None} {i.get('sharding')}"
                for i in instructions
                if _is_annotation(i) or i.get("sharding")
            ),
        )


def _is_annotation(instruction: Instruction) -> bool:
    return instruction.get("custom_call_target") in IDENTITY_TARGETS


def _encode_rows(
    module: Module, number: Callable[[Instruction], int], is_left_out: Callable[[Instruction], bool]
) -> tuple[array[int], dict[Instruction, int]]:
    """Every instruction in numbers (kind, operands, callees), and the numbering of instructions.

    An excluded instruction has its first operand's number.
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
    """Numbers of instructions up to their operands, in order of first use."""

    def __init__(self, *, left_out: frozenset[str]) -> None:
        self._ignored_attributes = left_out
        self._by_parts: dict[tuple[Any, ...], int] = {}  # by identity: attributes and shapes are interned
        self._by_text: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._by_text)

    def number(self, instruction: Instruction) -> int:
        attributes = [
            id(attribute) for name, attribute in instruction.attributes.items() if name not in self._ignored_attributes
        ]
        parts = (instruction.opcode, id(instruction.shape), instruction.payload, instruction.index, *attributes)
        kind = self._by_parts.get(parts)
        if kind is None:
            text = json.dumps(
                [
                    instruction.opcode,
                    format_shape(instruction.shape),
                    instruction.payload,
                    instruction.index,
                    [name if name in instruction.called else f"{name}={attribute.text}"
                     for name, attribute in instruction.attributes.items() if name not in self._ignored_attributes],
                ]
            )  # fmt: skip
            kind = self._by_parts[parts] = self._by_text.setdefault(text, len(self._by_text))
        return kind


def options_digest(options: PlanOptions) -> bytes:
    """Hash of the options. Names count when options refer to arguments by name."""
    left_out = frozenset() if isinstance(options.force, Mapping) else _NAMES
    return hash_json({field.name: _to_plain(getattr(options, field.name)) for field in dataclasses.fields(options)
                  if field.name not in left_out})  # fmt: skip


def cluster_digest(cluster: Cluster) -> bytes:
    """Hash of devices, hardware, memory and links; excludes names, addresses and security."""
    return hash_json(_to_plain(cluster))


@functools.cache
def planner_version() -> bytes:
    """Hash of the planner's sources and data, and of the version of XLA they plan for: part of every key."""
    digest = sha256(repr(xla_version()).encode())
    for source in SOURCES:
        path = FOLDER / source
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix in {".py", ".toml"}:
                digest.update(f"{file.relative_to(FOLDER)}\0".encode() + file.read_bytes())
    return digest.digest()


def _to_plain(value: Any) -> Any:
    """Dataclasses and mappings converted to sorted, JSON-compatible lists."""
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.name not in _IGNORED_FIELDS]
        return [[name, _to_plain(getattr(value, name))] for name in fields]
    if isinstance(value, Mapping):
        return sorted(([_to_plain(key), _to_plain(item)] for key, item in value.items()), key=repr)
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value


def hash_json(data: Any) -> bytes:
    """Hash of JSON data; other values by their `str`."""
    return sha256(json.dumps(data, sort_keys=True, default=str).encode()).digest()
