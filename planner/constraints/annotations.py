"""Reads pins: annotations inside the program, imported shardings, exact axes in the options.

`shardwright.annotate` leaves a custom call with its pins. JAX's constraints, `in_shardings` and `out_shardings` leave
theirs over a mesh of the program's own (`graph.imported_shardings`). Shardings on other instructions were rewritten to
calls before (`graph.sharding_calls`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.errors import OptionError
from shardwright.hlo import Instruction, Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.mesh_unification import unify_meshes
from shardwright.planner.constraints.pins import DimPin, Requirement, Requirements, array_error, array_name, pin_error
from shardwright.planner.graph.dataflow import Dataflow, Node
from shardwright.planner.graph.imported_shardings import (
    ImportedDim,
    ImportedSharding,
    ImportedShardingError,
    OneDeviceError,
    read_meshes,
    read_sharding,
)
from shardwright.planner.graph.sharding_calls import ShardingSource, find_output_shardings
from shardwright.reserved_names import ANNOTATION_TARGET, IDENTITY_TARGETS, PLACEMENT_TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableShardings:
    """The program's own shardings of its arguments and outputs, by flat number, in the program's dimensions.

    arguments / outputs: flat number → sharding.
    meshes: the program's own, by name.
    """

    arguments: Mapping[int, ImportedSharding] = field(default_factory=dict)
    outputs: Mapping[int, ImportedSharding] = field(default_factory=dict)
    meshes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Module, outputs: Iterable[ShardingSource] | None = None) -> VariableShardings:
        """Read from parameters, JAX's marks and the root.

        outputs: the module's `find_output_shardings`, if already computed.
        Raises AnnotationError on an unreadable one.
        """
        meshes = read_meshes(module)
        parameters = [
            (parameter, leaf) for parameter in module.entry.parameters for leaf in range(len(parameter.shape.leaves))
        ]
        arguments = [(number, *parameter_leaf) for number, parameter_leaf in enumerate(parameters)]

        def read(sources: Iterable[ShardingSource]) -> dict[int, ImportedSharding]:
            shardings = (
                (number, _imported(module, instruction, leaf, meshes)) for number, instruction, leaf in sources
            )
            return {number: sharding for number, sharding in shardings if sharding is not None}

        outputs = find_output_shardings(module.entry.root) if outputs is None else outputs
        return cls(arguments=read(arguments), outputs=read(outputs), meshes=meshes)


def collect_requirements(
    flow: Dataflow,
    options: PlanOptions,
    variables: VariableShardings | None = None,
    batch: Mapping[int, int] | None = None,
) -> Requirements:
    """Pins by node: annotations and shardings in the program, and exact axes of arguments and outputs.

    variables: shardings of arguments and outputs in the original program of `flow`; None: `flow` is that program.
    batch: flat number → batch dimension, in arguments with a micro-batch dimension right before it.
    Raises AnnotationError on an unreadable pin, and OptionError.
    """
    collected: Requirements = {}
    meshes = read_meshes(flow.module)
    for node in flow.nodes:
        if node.is_value and _is_annotation(node.instruction) and node.uses:
            is_own = node.instruction.get("custom_call_target") == ANNOTATION_TARGET
            if is_own or options.constraints == "keep":
                collected.setdefault(node.index, []).extend(_annotation(flow, node, meshes))
    if variables is None and options.constraints == "keep":
        variables = VariableShardings.of(flow.module)
    for index, requirement in _variable_pins(flow, variables or VariableShardings(), batch or {}):
        collected.setdefault(index, []).append(requirement)
    exact = (
        ("argument_axes", options.argument_axes, flow.parameters),
        ("output_axes", options.output_axes, flow.outputs),
    )
    for option, axes_by_number, nodes in exact:
        for index, requirement in _exact(flow, option, axes_by_number, nodes, options):
            collected.setdefault(index, []).append(requirement)
    return unify_meshes({index: requirements for index, requirements in collected.items() if requirements})


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
    sharding = _imported(flow.module, node.instruction, 0, meshes)
    return [] if sharding is None else [Requirement(asked_by="a sharding constraint", imported=sharding)]


def _variable_pins(
    flow: Dataflow, shardings: VariableShardings, batch: Mapping[int, int]
) -> Iterator[tuple[int, Requirement]]:
    ahead = {flow.parameters[number]: dim for number, dim in batch.items()}
    pins = [
        (flow.parameters[n], sharding, "the sharding of its argument") for n, sharding in shardings.arguments.items()
    ]
    pins += [(flow.outputs[n], sharding, "the sharding of its output") for n, sharding in shardings.outputs.items()]
    for node, sharding, asked_by in pins:
        stored = _as_stored(sharding, flow.nodes[node].shapes[0].rank, ahead.get(node))
        yield node, Requirement(asked_by=asked_by, imported=stored, may_pad=True)


def _as_stored(sharding: ImportedSharding, rank: int, batch: int | None) -> ImportedSharding:
    """A variable's sharding over the `rank` dimensions of its storage: either with a micro-batch dimension right before
    `batch`, or with one dimension stored in several, allowed only without any split."""
    if batch is not None:
        return replace(sharding, dims={dim + (dim + 1 >= batch): pinned for dim, pinned in sharding.dims.items()})
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
        if isinstance(error, OneDeviceError) and (not shape.rank or _places_memory(module)):
            return None
        raise array_error(
            module, instruction, shape, array_name(module, instruction), str(error), error.remedy
        ) from None


def _places_memory(module: Module) -> bool:
    """Whether a program says in which memory values lie. Such programs of one device have shardings that name it, on
    arguments, results and the calls themselves: none of them is a wish."""
    return any(instruction.get("custom_call_target") == PLACEMENT_TARGET for instruction in module.instructions())


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
