"""Reading pins: annotations inside the program, the shardings that it brings along, exact axes from the options.

`shardwright.annotate` leaves a custom call with its pins; JAX's constraints, `in_shardings` and `out_shardings` leave
theirs over a mesh of the program's own (`planner.foreign`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwright.config import ANNOTATION_TARGET, PlanOptions
from shardwright.errors import OptionError, UnsupportedProgramError
from shardwright.hlo import Instruction
from shardwright.planner.dataflow import Dataflow, Node
from shardwright.planner.foreign import ForeignShardingError, meshes_of, sharding_of
from shardwright.planner.pins import DimPin, Requirement, Requirements, refusal
from shardwright.planner.rules.tuples import IDENTITY_TARGETS

#: custom call by which JAX says how an output lies (`out_shardings`).
_OUTPUT_TARGET = "xla.sdy.FuncResultSharding"

#: custom calls at the border of what is written for one device.
_MANUAL_TARGETS = frozenset(
    {"SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"}
)


def collect(flow: Dataflow, options: PlanOptions) -> Requirements:
    """Pins by node: annotations and shardings in the program, and exact axes of arguments and outputs.

    Raises AnnotationError for one that cannot be read, OptionError, and UnsupportedProgramError for `shard_map`.
    """
    refuse_manual(flow)
    found: Requirements = {}
    meshes = meshes_of(flow.module)
    for node in flow.nodes:
        if node.is_value and _is_annotation(node.instruction) and node.uses:
            found.setdefault(node.index, []).extend(_annotation(flow, node, meshes))
    for index, requirement in (*_argument_shardings(flow, meshes), *_output_shardings(flow, meshes)):
        found.setdefault(index, []).append(replace(requirement, may_pad=True))
    exact = (
        ("argument_axes", options.argument_axes, flow.parameters),
        ("output_axes", options.output_axes, flow.outputs),
    )
    for option, axes_by_number, nodes in exact:
        for index, requirement in _exact(flow, option, axes_by_number, nodes, options):
            found.setdefault(index, []).append(requirement)
    return {index: requirements for index, requirements in found.items() if requirements}


def refuse_manual(flow: Dataflow) -> None:
    """Raises UnsupportedProgramError for computations that the program writes for one device (`shard_map`)."""
    for node in flow.nodes:
        target = node.instruction.get("custom_call_target")
        if target in _MANUAL_TARGETS:
            raise UnsupportedProgramError(
                f"the program holds computations written for one device ({target}; shard_map or the like)",
                where=str(flow.module.source(node.instruction) or node.instruction.name),
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
            raise OptionError(f"there is no number {number}: the program has {len(nodes)}", where=option)
        dims = {dim: DimPin(axes=tuple(split)) for dim, split in enumerate(axes)}
        rank = flow.nodes[nodes[number]].shapes[0].rank
        if len(dims) != rank:
            raise OptionError(f"number {number} has rank {rank}, not {len(dims)}", where=option)
        yield nodes[number], Requirement(asked_by=option, dims=dims, may_pad=True)


def _is_annotation(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and instruction.get("custom_call_target") in IDENTITY_TARGETS


def _annotation(flow: Dataflow, node: Node, meshes: Mapping[str, Mapping[str, int]]) -> list[Requirement]:
    if node.instruction.get("custom_call_target") == ANNOTATION_TARGET:
        return [Requirement(asked_by="an annotation", dims=_own_pins(flow, node))]
    return _foreign(flow, node, node.instruction, 0, "a sharding constraint", meshes)


def _argument_shardings(flow: Dataflow, meshes: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[int, Requirement]]:
    for index in flow.parameters:
        node = flow.nodes[index]
        for requirement in _foreign(flow, node, node.instruction, node.leaf, "the sharding of its argument", meshes):
            yield index, requirement


def _output_shardings(flow: Dataflow, meshes: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[int, Requirement]]:
    """What JAX's mark on an output says, else the root. An output in an argument's place is that argument."""
    root = flow.module.entry.root
    for leaf, (index, (made, _)) in enumerate(zip(flow.outputs, flow.leaves[root], strict=True)):
        maker = flow.nodes[made]
        is_marked = maker.instruction.get("custom_call_target") == _OUTPUT_TARGET
        if maker.is_value and _is_annotation(maker.instruction) and not is_marked:
            continue
        instruction, at = (maker.instruction, 0) if is_marked else (root, leaf)
        if instruction.opcode == "parameter":
            continue
        for requirement in _foreign(flow, flow.nodes[index], instruction, at, "the sharding of its output", meshes):
            yield index, requirement


def _foreign(
    flow: Dataflow,
    node: Node,
    instruction: Instruction,
    leaf: int,
    asked_by: str,
    meshes: Mapping[str, Mapping[str, int]],
) -> list[Requirement]:
    try:
        sharding = sharding_of(instruction, meshes, node.shapes[0].rank, leaf)
    except ForeignShardingError as error:
        raise refusal(flow, node, instruction.op_name or instruction.name, str(error), error.remedy) from None
    return [] if sharding is None else [Requirement(asked_by=asked_by, foreign=sharding)]


def _own_pins(flow: Dataflow, node: Node) -> dict[int, DimPin]:
    """`0:data,1:-,2:*`; axes of one dimension are joined by `·` or `+`."""
    text = str(node.instruction.get("backend_config") or "")
    pins = {}
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\S+)\s*", item)
        if match is None:
            raise refusal(
                flow, node, node.instruction.name, f"annotation {text!r} cannot be read", "write `0:data,1:-`"
            )
        what = match[2]
        if what == "-":
            pins[int(match[1])] = DimPin(axes=())
        elif what == "*":
            pins[int(match[1])] = DimPin(somewhere=True)
        else:
            pins[int(match[1])] = DimPin(axes=tuple(re.split(r"[·+]", what)))
    return pins
