"""Many trials side by side in one module, with the plan that shards each as its factors say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.hlo import Attribute, Computation, Instruction, Module, Shape, TupleShape
from shardwright.plans.plan import CostSummary, InstructionPlan, MemorySummary, Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding, ValueSharding
from tests.planner.rules.rule_cases import Case, Trial, trial_shardings
from tests.planner.trial_parts import copied_regions, trials_module


@dataclass
class Bundle:
    """A module under construction: trial k is instruction `case.k` with parameters of its own.

    parameter_trials / output_trials: whose each parameter and each output is, in order.
    definite: numbers of the parameters that must be positive definite matrices.
    """

    mesh: Mesh
    entry: list[Instruction] = field(default_factory=list)
    regions: list[Computation] = field(default_factory=list)
    parameters: list[Instruction] = field(default_factory=list)
    outputs: list[Instruction] = field(default_factory=list)
    parameter_shardings: list[TensorSharding] = field(default_factory=list)
    output_shardings: list[TensorSharding] = field(default_factory=list)
    parameter_trials: list[int] = field(default_factory=list)
    output_trials: list[int] = field(default_factory=list)
    plans: list[InstructionPlan] = field(default_factory=list)
    definite: list[int] = field(default_factory=list)

    @classmethod
    def whole(cls, cases: Sequence[Case]) -> Bundle:
        """Each case once, split by nothing."""
        bundle = cls(Mesh.of({"single": 1}))
        for number, case in enumerate(cases):
            bundle.add(number, Trial(case, {}, bundle.mesh))
        return bundle

    def add(self, number: int, trial: Trial) -> None:
        original = trial.case.instruction
        operand_shardings = trial_shardings(trial, operands=True)
        operands, values, leaf = [], [], 0
        for position, operand in enumerate(original.operands):
            count = len(operand.shape.leaves)
            shardings = operand_shardings[leaf : leaf + count]
            leaf += count
            operands.append(self._operand(number, position, operand, shardings[0]))
            values.append(shardings)
        if original.opcode == "cholesky" or "potrf" in original.get("custom_call_target", ""):
            self.definite.append(operands[0].index)
        called, attributes = copied_regions(str(number), original)
        self.regions += [region for regions in called.values() for region in regions]
        case = Instruction(
            name=f"case.{number}", opcode=original.opcode, shape=original.shape, operands=tuple(operands),
            attributes=attributes, called=called, payload=original.payload, index=original.index,
        )  # fmt: skip
        self.entry.append(case)
        results = trial_shardings(trial, operands=False)
        self._output(number, case, results)
        self.plans.append(
            InstructionPlan(
                computation="main", name=case.name, opcode=case.opcode, operands=tuple(values), result=results,
                partial=trial.partial,
            )
        )  # fmt: skip

    def _operand(self, number: int, position: int, operand: Instruction, sharding: TensorSharding) -> Instruction:
        name = f"p{number}_{position}"
        if operand.opcode == "constant" and not operand.shape.leaves[0].dimensions:
            copy = Instruction(name=name, opcode="constant", shape=operand.shape, payload=operand.payload)
        else:
            copy = Instruction(name=name, opcode="parameter", shape=operand.shape, index=len(self.parameters))
            self.parameters.append(copy)
            self.parameter_trials.append(number)
            self.parameter_shardings.append(sharding)
        self.entry.append(copy)
        return copy

    def _output(self, number: int, case: Instruction, results: ValueSharding) -> None:
        leaves = [case]
        if isinstance(case.shape, TupleShape):
            leaves = [_element(case, i, element) for i, element in enumerate(case.shape.elements)]
            self.entry.extend(leaves)
        self.outputs.extend(leaves)
        self.output_shardings.extend(results)
        self.output_trials.extend([number] * len(leaves))

    def module(self) -> Module:
        return trials_module(self.regions, self.entry, self.parameters, self.outputs)

    def plan(self) -> Plan:
        return Plan(
            module_name="trials", hlo_sha256="", mesh=self.mesh, hardware="cpu", origin="trial",
            instructions=tuple(self.plans),
            parameters=_variables(self.parameters, self.parameter_shardings, self.mesh),
            outputs=_variables(self.outputs, self.output_shardings, self.mesh),
            collectives=(), cost=CostSummary(compute_s=0, communication_s=0, lower_bound_s=0, bound_scope=""),
            memory=MemorySummary(arguments_bytes=0, outputs_bytes=0, temporaries_bytes=0),
        )  # fmt: skip


def _element(value: Instruction, index: int, shape: Shape) -> Instruction:
    return Instruction(
        name=f"{value.name}_leaf{index}",
        opcode="get-tuple-element",
        shape=shape,
        operands=(value,),
        attributes={"index": Attribute("index", str(index), index)},
        index=index,
    )


def _variables(
    values: Sequence[Instruction], shardings: Sequence[TensorSharding], mesh: Mesh
) -> tuple[VariablePlan, ...]:
    """Boundary arrays; a dimension that its axes do not divide is stored padded to the next multiple."""
    results = []
    for number, (value, sharding) in enumerate(zip(values, shardings, strict=True)):
        shape = value.shape.leaves[0]
        parts = [mesh.size(axes) for axes in sharding.dims]
        stored = tuple(-(-size // n) * n for size, n in zip(shape.dimensions, parts, strict=True))
        results.append(
            VariablePlan(
                number=number, name=value.name, element_type=shape.element_type, shape=shape.dimensions,
                sharding=sharding, stored_shape=stored,
            )
        )  # fmt: skip
    return tuple(results)
