"""Reading pins: annotations inside the program, the shardings that it brings along, exact axes from the options.

`shardwright.annotate` leaves a custom call with its pins; JAX's constraints, `in_shardings` and `out_shardings` leave
theirs over a mesh of the program's own (`graph.imported_shardings`). What other instructions carry was written out as
calls before (`graph.sharding_calls`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.config import ANNOTATION_TARGET, IDENTITY_TARGETS, MANUAL_TARGETS, PlanOptions
from shardwright.errors import OptionError, UnsupportedProgramError
from shardwright.hlo import Instruction, Module
from shardwright.planner.constraints.mesh_unification import unify_meshes
from shardwright.planner.constraints.pins import DimPin, Requirement, Requirements, array_error, array_name, pin_error
from shardwright.planner.graph.dataflow import Dataflow, Node
from shardwright.planner.graph.imported_shardings import (
    ImportedDim,
    ImportedSharding,
    ImportedShardingError,
    read_meshes,
    read_sharding,
)
from shardwright.planner.graph.sharding_calls import ShardingSource, find_output_shardings


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableShardings:
    """What a program says of how its arguments and outputs lie, by flat number, in the dimensions that it gives them.

    meshes: the program's own, by name.
    """

    arguments: Mapping[int, ImportedSharding] = field(default_factory=dict)
    outputs: Mapping[int, ImportedSharding] = field(default_factory=dict)
    meshes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Module, outputs: Iterable[ShardingSource] | None = None) -> VariableShardings:
        """Read from parameters, JAX's marks and the root.

        outputs: the module's `find_output_shardings`, where they were looked for before.
        Raises AnnotationError for one that cannot be read.
        """
        meshes = read_meshes(module)
        parameters = [(each, leaf) for each in module.entry.parameters for leaf in range(len(each.shape.leaves))]
        arguments = [(number, *each) for number, each in enumerate(parameters)]

        def read(said: Iterable[ShardingSource]) -> dict[int, ImportedSharding]:
            found = ((number, _imported(module, instruction, leaf, meshes)) for number, instruction, leaf in said)
            return {number: each for number, each in found if each is not None}

        outputs = find_output_shardings(module.entry.root) if outputs is None else outputs
        return cls(arguments=read(arguments), outputs=read(outputs), meshes=meshes)


def collect_requirements(
    flow: Dataflow,
    options: PlanOptions,
    variables: VariableShardings | None = None,
    batch: Mapping[int, int] | None = None,
) -> Requirements:
    """Pins by node: annotations and shardings in the program, and exact axes of arguments and outputs.

    variables: what the program that `flow` was made of says of arguments and outputs; None: it is that program.
    batch: by flat number, the dimension of the batch in arguments that have one for micro-batches right ahead of it.
    Raises AnnotationError for one that cannot be read, and OptionError.
    """
    found: Requirements = {}
    meshes = read_meshes(flow.module)
    for node in flow.nodes:
        if node.is_value and _is_annotation(node.instruction) and node.uses:
            is_own = node.instruction.get("custom_call_target") == ANNOTATION_TARGET
            if is_own or options.constraints == "keep":
                found.setdefault(node.index, []).extend(_annotation(flow, node, meshes))
    if variables is None and options.constraints == "keep":
        variables = VariableShardings.of(flow.module)
    for index, requirement in _variable_pins(flow, variables or VariableShardings(), batch or {}):
        found.setdefault(index, []).append(requirement)
    exact = (
        ("argument_axes", options.argument_axes, flow.parameters),
        ("output_axes", options.output_axes, flow.outputs),
    )
    for option, axes_by_number, nodes in exact:
        for index, requirement in _exact(flow, option, axes_by_number, nodes, options):
            found.setdefault(index, []).append(requirement)
    return unify_meshes({index: requirements for index, requirements in found.items() if requirements})


def refuse_manual(module: Module) -> None:
    """Raises UnsupportedProgramError for computations that the program writes for one device (`shard_map`)."""
    for instruction in module.instructions():
        target = instruction.get("custom_call_target") if instruction.opcode == "custom-call" else None
        if target in MANUAL_TARGETS:
            raise UnsupportedProgramError(
                f"the program holds computations written for one device ({target}; shard_map or the like)",
                where=str(module.source(instruction) or instruction.op_name or instruction.name),
                remedy="hand over the step without shard_map: the planner shards it",
            )


def _exact(
    flow: Dataflow,
    option: str,
    axes_by_number: Mapping[int, tuple[tuple[str, ...], ...]],
    nodes: Sequence[int],
    options: PlanOptions,
) -> Iterator[tuple[int, Requirement]]:
    if axes_by_number and options.mesh is None:
        raise OptionError(f"{option} needs mesh", where=option, remedy="pass the mesh that the arrays lie on")
    for number, axes in sorted(axes_by_number.items()):
        if not 0 <= number < len(nodes):
            raise OptionError(
                f"there is no number {number}: the program has {len(nodes)}",
                where=option,
                remedy=f"number them from 0 to {len(nodes) - 1}" if nodes else "leave it out",
            )
        dims = {dim: DimPin(axes=tuple(split)) for dim, split in enumerate(axes)}
        rank = flow.nodes[nodes[number]].shapes[0].rank
        if len(dims) != rank:
            raise OptionError(
                f"number {number} has rank {rank}, not {len(dims)}", where=option, remedy="give axes for each dimension"
            )
        yield nodes[number], Requirement(asked_by=option, dims=dims, may_pad=True)


def _is_annotation(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and instruction.get("custom_call_target") in IDENTITY_TARGETS


def _annotation(flow: Dataflow, node: Node, meshes: Mapping[str, Mapping[str, int]]) -> list[Requirement]:
    if node.instruction.get("custom_call_target") == ANNOTATION_TARGET:
        return [Requirement(asked_by="an annotation", dims=_own_pins(flow, node))]
    found = _imported(flow.module, node.instruction, 0, meshes)
    return [] if found is None else [Requirement(asked_by="a sharding constraint", imported=found)]


def _variable_pins(
    flow: Dataflow, said: VariableShardings, batch: Mapping[int, int]
) -> Iterator[tuple[int, Requirement]]:
    ahead = {flow.parameters[number]: dim for number, dim in batch.items()}
    found = [(flow.parameters[n], each, "the sharding of its argument") for n, each in said.arguments.items()]
    found += [(flow.outputs[n], each, "the sharding of its output") for n, each in said.outputs.items()]
    for node, sharding, asked_by in found:
        stored = _as_stored(sharding, flow.nodes[node].shapes[0].rank, ahead.get(node))
        yield node, Requirement(asked_by=asked_by, imported=stored, may_pad=True)


def _as_stored(sharding: ImportedSharding, rank: int, batch: int | None) -> ImportedSharding:
    """A sharding said of the `rank` dimensions that the variable is stored in: with one for micro-batches right ahead
    of `batch`, or with several where one held several things, which only those that nothing splits may have."""
    if batch is not None:
        return replace(sharding, dims={dim + (dim + 1 >= batch): each for dim, each in sharding.dims.items()})
    if sharding.is_split or not sharding.dims:
        return sharding
    return replace(sharding, dims={dim: ImportedDim() for dim in range(rank)})


def _imported(
    module: Module, instruction: Instruction, leaf: int, meshes: Mapping[str, Mapping[str, int]]
) -> ImportedSharding | None:
    shape = instruction.shape.leaves[leaf]
    try:
        return read_sharding(instruction, meshes, shape.rank, leaf)
    except ImportedShardingError as error:
        raise array_error(
            module, instruction, shape, array_name(module, instruction), str(error), error.remedy
        ) from None


def _own_pins(flow: Dataflow, node: Node) -> dict[int, DimPin]:
    """`0:data,1:-,2:*`; axes of one dimension are joined by `·` or `+`."""
    text = str(node.instruction.get("backend_config") or "")
    pins = {}
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\S+)\s*", item)
        if match is None:
            raise pin_error(
                flow,
                node,
                array_name(flow.module, node.instruction),
                f"annotation {text!r} cannot be read",
                "write `0:data,1:-`",
            )
        what = match[2]
        if what == "-":
            pins[int(match[1])] = DimPin(axes=())
        elif what == "*":
            pins[int(match[1])] = DimPin(somewhere=True)
        else:
            pins[int(match[1])] = DimPin(axes=tuple(re.split(r"[·+]", what)))
    return pins
