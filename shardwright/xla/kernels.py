"""Kernels as devices compute them: each part by the program that the call holds for it, or that JAX has.

The program of a part (`shardwright.kernels.forms`, `ragged_kernel`) becomes a function of the module, one for equal
parts of equal kernels; a manual computation calls it on the device's parts, and adds partial results up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import PlanError
from shardwright.kernels import KERNEL_TARGET, decode_forms
from shardwright.kernels.ragged import RAGGED_TARGET
from shardwright.kernels.rules import Shapes
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.reserved_names import IDENTITY_TARGETS
from shardwright.xla import private
from shardwright.xla.manual_region import ManualRegion, manual_axes_around, replace_elements
from shardwright.xla.operations import operations_within
from shardwright.xla.part_results import part_results, result_types
from shardwright.xla.ragged_kernel import lower_ragged
from shardwright.xla.strip import annotation_target, erase_annotations, strip_foreign_shardings


def is_kernel(operation: Any) -> bool:
    """Whether an operation is the call of a kernel that comes with its parts."""
    return annotation_target(operation) in (KERNEL_TARGET, RAGGED_TARGET)


@dataclass(slots=True)
class KernelWriter:
    """Writes kernels into one module.

    attribute: a sharding in Shardy's form. multiprocessors: of devices with JAX's kernel of ragged products; 0: they
    are written out.
    """

    module: Any
    mesh: Mesh
    attribute: Callable[[TensorSharding], Any]
    multiprocessors: int
    _functions: dict[tuple[str, tuple[str, ...], Shapes], str] = field(default_factory=dict)

    def compute(self, operation: Any, entry: InstructionPlan | None) -> None:
        """Put a device's part in place of a kernel's call. entry: the plan of it, or None: whole on every device.

        Operands must have the layouts of the plan's uses. Raises PlanError where the call holds no program of the part.
        """
        types, is_tuple = result_types(operation)
        used = _whole(operation.operands) if entry is None else [s for value in entry.operands for s in value]
        results = part_results(types, entry, self.mesh)
        with operation.location, private.ir().InsertionPoint(operation):
            if {axis.name for axis in self.mesh.axes} <= manual_axes_around(operation.operation.block):
                values = self._call(operation, [*operation.operands], types)
            else:
                region = ManualRegion([*operation.operands], used, results, self.mesh, self.attribute)
                with region:
                    region.hand_out(self._call(operation, region.arguments, region.parts))
                values = region.join()
        if is_tuple:
            replace_elements(operation, values)
        else:
            for whole, result in zip(operation.results, values, strict=True):
                whole.replace_all_uses_with(result)
        operation.operation.erase()

    def _call(self, operation: Any, arguments: list[Any], results: Sequence[Any]) -> list[Any]:
        """A call of the program of a part, at the current insertion point. results: their types."""
        name = self._function(operation, arguments)
        return [*private.dialect("func").CallOp(results, name, arguments).results]

    def _function(self, operation: Any, arguments: list[Any]) -> str:
        """The name of the module's function that computes a part of these types."""
        config = operation.attributes["backend_config"].value
        types = tuple(str(argument.type.element_type) for argument in arguments)
        shapes = tuple(tuple(argument.type.shape) for argument in arguments)
        key = config, types, shapes
        if key not in self._functions:
            if annotation_target(operation) == RAGGED_TARGET:
                text = lower_ragged(config, shapes, types[0], self.multiprocessors)
            else:
                text = private.stablehlo_of(self._form(operation, config, shapes))
            self._functions[key] = self._add(text)
        return self._functions[key]

    def _form(self, operation: Any, config: str, shapes: Shapes) -> str:
        """The program that a call holds for a part. Raises PlanError without one."""
        form = (decode_forms(config) or {}).get(shapes)
        if form is None:
            raise PlanError(
                f"the kernel holds no program for operands of {' and '.join(str(list(each)) for each in shapes)}",
                where=private.location_name(operation.location) or KERNEL_TARGET,
                remedy="plan this program again: the plan is of another one",
            )
        return form.hlo_text

    def _add(self, stablehlo: str) -> str:
        """Puts a program's functions into the module, under names of their own; the name of the first one."""
        ir = private.ir()
        added = private.parse_module(stablehlo)
        strip_foreign_shardings(added)  # of a mesh that it was lowered under: XLA aborts on them beside Shardy's
        erase_annotations(
            [each for each in operations_within(added.operation) if annotation_target(each) in IDENTITY_TARGETS]
        )
        prefix = f"{KERNEL_TARGET}.{len(self._functions)}."
        for function in list(added.body.operations):
            if function.operation.name != "func.func":
                continue
            for inner in operations_within(function.operation):
                if "callee" in inner.attributes:
                    inner.attributes["callee"] = ir.FlatSymbolRefAttr.get(prefix + inner.attributes["callee"].value)
            function.attributes["sym_name"] = ir.StringAttr.get(prefix + function.name.value)
            function.attributes["sym_visibility"] = ir.StringAttr.get("private")
            function.operation.detach_from_parent()
            self.module.body.append(function)
        return prefix + "main"


def _whole(operands: Any) -> list[TensorSharding]:
    return [TensorSharding.replicated(operand.type.rank) for operand in operands]
