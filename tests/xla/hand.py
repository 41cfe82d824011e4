"""Plans written by hand, for the tests of emission."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.plans.plan import CostSummary, InstructionPlan, MemorySummary, Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import BoundaryArray, ObservedCollective, load_program

Dims = Sequence[str | tuple[str, ...] | None]


def sharding(dims: Dims, unreduced: tuple[str, ...] = ()) -> TensorSharding:
    """`sharding(("x", None))`: dimension 0 over axis x, dimension 1 whole."""
    return TensorSharding(
        tuple(() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in dims), unreduced
    )


def entry(
    name: str,
    operands: Sequence[TensorSharding | Sequence[TensorSharding]],
    result: TensorSharding | Sequence[TensorSharding],
    partial: tuple[str, ...] = (),
    *,
    opcode: str = "",
    computation: str = "main",
) -> InstructionPlan:
    return InstructionPlan(
        computation=computation,
        name=name,
        opcode=opcode or name.split(".")[0],
        operands=tuple((item,) if isinstance(item, TensorSharding) else tuple(item) for item in operands),
        result=(result,) if isinstance(result, TensorSharding) else tuple(result),
        partial=partial,
    )


def variable(
    number: int, element_type: str, shape: tuple[int, ...], layout: TensorSharding, mesh: Mesh, alias: int | None = None
) -> VariablePlan:
    return VariablePlan.from_sharding(number, f"v{number}", element_type, shape, layout, mesh, alias=alias)


def layout(hlo: str) -> tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, tuple[int, ...]]]]:
    """(type, shape) of each parameter and each output, from the header of the text."""
    line = next(line for line in hlo.splitlines() if line.startswith("HloModule"))
    inside = re.search(r"entry_computation_layout=\{(.*)\}", line).group(1)
    inputs, outputs = inside.split("->")
    results = []
    for side in (inputs, outputs):
        results.append(
            [
                (kind, tuple(int(n) for n in dims.split(",") if n))
                for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", side)
            ]
        )
    return results[0], results[1]


def plan(
    hlo: str,
    mesh: Mapping[str, int],
    parameters: Mapping[int, Dims | TensorSharding] | None = None,
    outputs: Mapping[int, Dims | TensorSharding] | None = None,
    entries: Sequence[InstructionPlan] = (),
    aliases: Mapping[int, int] | None = None,
    manual_axes: Mapping[str, tuple[str, ...]] | None = None,
) -> Plan:
    """A plan for `hlo`; variables that are not named lie whole on every device. aliases: output → parameter."""
    shape = Mesh.of(mesh)
    ins, outs = layout(hlo)
    aliases = aliases or {}
    of_parameter = {parameter: output for output, parameter in aliases.items()}
    return Plan(
        module_name="by_hand",
        hlo_sha256=hashlib.sha256(hlo.encode()).hexdigest(),
        mesh=shape,
        hardware="cpu",
        origin="by hand",
        instructions=tuple(entries),
        parameters=tuple(
            variable(n, kind, dims, _lies((parameters or {}).get(n), len(dims)), shape, of_parameter.get(n))
            for n, (kind, dims) in enumerate(ins)
        ),
        outputs=tuple(
            variable(n, kind, dims, _lies((outputs or {}).get(n), len(dims)), shape, aliases.get(n))
            for n, (kind, dims) in enumerate(outs)
        ),
        collectives=(),
        cost=CostSummary(compute_s=0.0, communication_s=0.0, lower_bound_s=0.0, bound_scope="none"),
        memory=MemorySummary(arguments_bytes=0, outputs_bytes=0, temporaries_bytes=0),
        manual_axes=manual_axes or {},
        hlo_text=hlo,
    )


def _lies(layout: Dims | TensorSharding | None, rank: int) -> TensorSharding:
    return layout if isinstance(layout, TensorSharding) else sharding((None,) * rank if layout is None else layout)


def lower(function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> str:
    """HLO text of a single-device function of arrays."""
    import jax

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    return jax.jit(function, donate_argnums=donate, keep_unused=True).lower(*shapes).as_text("hlo")


def names_of(hlo: str, opcode: str) -> list[str]:
    """Names of the instructions with an opcode, in text order."""
    return re.findall(rf"^ *(?:ROOT )?(\S+) = .*?[\]}})] {re.escape(opcode)}\(", hlo, re.MULTILINE)


def run_planned(planned: Plan, *arguments: Any) -> tuple[list[np.ndarray], tuple[ObservedCollective, ...]]:
    """Compile a plan here, run it on logical arguments: (logical outputs, observed collectives)."""
    from shardwright.xla.compiling import compile_planned

    program = compile_planned(planned.require_hlo(), planned, want_executable=False)
    return run_emitted(program.stablehlo, planned, *arguments), program.collectives


def run_emitted(stablehlo: str, planned: Plan, *arguments: Any) -> list[np.ndarray]:
    """Logical outputs of a plan's emitted program, of logical arguments."""
    import jax

    loaded = load_program(
        stablehlo.encode(),
        is_serialized=False,
        mesh=planned.mesh,
        arguments=[BoundaryArray.of(v) for v in planned.parameters],
        outputs=[BoundaryArray.of(v) for v in planned.outputs],
        donated=[v.number for v in planned.parameters if v.alias is not None],
    )
    placed = [
        jax.device_put(store_layout(array, v.stored_shape), lies)
        for array, v, lies in zip(arguments, planned.parameters, loaded.argument_shardings, strict=True)
    ]
    outputs = [np.asarray(array) for array in loaded.run(placed)]
    for array, v in zip(outputs, planned.outputs, strict=True):
        assert array.shape == v.stored_shape
    return [array[tuple(map(slice, v.shape))] for array, v in zip(outputs, planned.outputs, strict=True)]


def store_layout(array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An array padded with sevens to its stored shape: what the padding holds must not matter."""
    array = np.asarray(array)
    if array.shape == shape:
        return array
    widths = [(0, large - small) for small, large in zip(array.shape, shape, strict=True)]
    return np.pad(array, widths, constant_values=7)


def kinds(collectives: Sequence[ObservedCollective]) -> list[tuple[str, int]]:
    """(kind, group size) of what moves anything, sorted."""
    return sorted((c.kind, c.group_size) for c in collectives if c.group_size > 1)
