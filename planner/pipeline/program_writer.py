"""Writes one program of a pipeline: its instructions and their layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.errors import InternalError
from shardwright.hlo import ArrayShape, Attribute, Computation, Instruction, Module, TupleShape, format_shape
from shardwright.hlo.shapes import without_layout
from shardwright.planner.pipeline.layouts import StageLayouts, leaves_before
from shardwright.planner.plans.verify import CALLING
from shardwright.planner.rewrites.edit import attribute, check_consistency, copy_of
from shardwright.plans.plan import InstructionPlan, VariablePlan
from shardwright.plans.shardings import TensorSharding, ValueSharding
from shardwright.tasks import ProgramKind

#: Instructions whose result is their operands', or a part of it.
_HANDING_ON = frozenset(
    {"tuple", "get-tuple-element", "opt-barrier", "optimization-barrier", "domain", "add-dependency"}
)

#: What the entry computation of every program is called.
ENTRY = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramDraft:
    """A program of a pipeline before its costs are known; fields as in `PipelineProgram`."""

    name: str
    kind: ProgramKind
    stage: int
    chunk: int | None
    module: Module
    entries: tuple[InstructionPlan, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[VariablePlan, ...]
    outputs: tuple[VariablePlan, ...]


@dataclass(frozen=True, slots=True)
class _Output:
    value: str
    instruction: Instruction
    sharding: TensorSharding
    view_of: tuple[int, ...] | None


@dataclass(slots=True, kw_only=True, eq=False)
class ProgramWriter:
    """One program under construction: parameters first, then instructions in order, then outputs.

    source: the module to copy instructions from. layouts: those of the program's stage.
    """

    name: str
    kind: ProgramKind
    stage: int
    chunk: int | None
    source: Module
    layouts: StageLayouts
    _parameters: dict[str, Instruction] = field(default_factory=dict)  # by value
    _variables: list[VariablePlan] = field(default_factory=list)
    _instructions: list[Instruction] = field(default_factory=list)
    _entries: dict[str, InstructionPlan] = field(default_factory=dict)
    _copies: dict[Instruction, Instruction] = field(default_factory=dict)
    _outputs: dict[str, _Output] = field(default_factory=dict)
    _called: dict[Computation, None] = field(default_factory=dict)

    # ---- instructions ------------------------------------------------------
    def parameter(
        self,
        value: str,
        name: str,
        shape: ArrayShape,
        sharding: TensorSharding,
        *,
        like: Instruction | None = None,
        view_of: tuple[int, ...] | None = None,
    ) -> Instruction:
        """The parameter for `value`; a second call returns the same one. like: source of its metadata."""
        existing = self._parameters.get(value)
        if existing is not None:
            return existing
        number = len(self._parameters)
        instruction = Instruction(name, "parameter", without_layout(shape), index=number)
        if like is not None and "metadata" in like.attributes:
            instruction.attributes["metadata"] = like.attributes["metadata"]
        self._parameters[value] = instruction
        self._variables.append(
            VariablePlan.from_sharding(
                number, value, shape.element_type, shape.dimensions, sharding, self.layouts.mesh, view_of=view_of
            )
        )
        self._enter(instruction, (), (sharding,))
        return instruction

    def stand_in(self, original: Instruction, replacement: Instruction) -> None:
        """Lets copies read `replacement` in place of the source's `original`."""
        self._copies[original] = replacement

    def has(self, original: Instruction) -> bool:
        return original in self._copies

    def of(self, original: Instruction) -> Instruction:
        """This program's instruction for one of the source."""
        return self._copies[original]

    def copy_in(self, original: Instruction, sharding: TensorSharding) -> Instruction:
        """Copies an instruction whose operands and result lie alike, whatever the plan of the whole step says."""
        operands = [(self._copies[operand], sharding) for operand in original.operands]
        instruction = copy_of(original, [operand for operand, _ in operands], is_root=False)
        self._copies[original] = instruction
        self._instructions.append(instruction)
        self._enter(instruction, tuple((used,) for _, used in operands), (sharding,))
        return instruction

    def copy(self, original: Instruction) -> Instruction:
        """Copies an instruction of the source, with the same name; its operands must be present."""
        instruction = copy_of(original, [self._copies[operand] for operand in original.operands], is_root=False)
        self._copies[original] = instruction
        self._instructions.append(instruction)
        entry = self._put(self._entry_of(instruction, ENTRY))
        for computation in _regions(original):
            self._take_along(computation)
        for computation, given, result in _bodies(instruction, entry):
            self._plan_body(computation, given, result)
        return instruction

    def make(
        self,
        opcode: str,
        name: str,
        shape: ArrayShape,
        operands: Sequence[tuple[Instruction, TensorSharding]],
        sharding: TensorSharding,
        *,
        attributes: Sequence[Attribute] = (),
        payload: str = "",
    ) -> Instruction:
        """A new instruction. operands: each with its layout at this use; sharding: layout of the result."""
        instruction = Instruction(name, opcode, shape, tuple(operand for operand, _ in operands), payload=payload)
        instruction.attributes.update({extra.name: extra for extra in attributes})
        self._instructions.append(check_consistency(instruction))
        self._enter(instruction, tuple((used,) for _, used in operands), (sharding,))
        return instruction

    def _enter(self, instruction: Instruction, operands: tuple[ValueSharding, ...], result: ValueSharding) -> None:
        self._put(
            InstructionPlan(
                computation=ENTRY, name=instruction.name, opcode=instruction.opcode, operands=operands, result=result
            )
        )

    def _put(self, entry: InstructionPlan) -> InstructionPlan:
        if entry.name in self._entries:
            raise InternalError(f"two instructions called {entry.name}", where=self.name)
        self._entries[entry.name] = entry
        return entry

    def _entry_of(self, instruction: Instruction, computation: str) -> InstructionPlan:
        """The entry from the plan of the whole step; instructions that hand values on follow their operands."""
        if instruction.opcode not in _HANDING_ON:
            return self.layouts.entry(instruction, computation)
        operands = tuple(self._entries[operand.name].result for operand in instruction.operands)
        leaves = tuple(sharding for value in operands for sharding in value)
        if instruction.opcode == "get-tuple-element":
            first = leaves_before(instruction)
            leaves = leaves[first : first + len(instruction.shape.leaves)]
        return InstructionPlan(
            computation=computation, name=instruction.name, opcode=instruction.opcode, operands=operands, result=leaves
        )

    # ---- computations that instructions call -----------------------------------
    def _take_along(self, computation: Computation) -> None:
        """Adds a computation to the module, after those it calls."""
        for instruction in computation:
            for inner in _regions(instruction):
                self._take_along(inner)
        self._called.setdefault(computation)

    def _plan_body(
        self, computation: Computation, parameters: Sequence[ValueSharding], result: ValueSharding | None
    ) -> None:
        """Entries of a body planned like the entry. parameters: their layouts; result: of its root, if known."""
        if computation.root.name in self._entries:
            return  # a callee of several places is planned once, for all of them
        for instruction in computation:
            if instruction.opcode == "parameter":
                operands: tuple[ValueSharding, ...] = ()
                layout = parameters[instruction.index]
            elif instruction is computation.root and instruction.opcode == "tuple" and result is not None:
                operands, layout = group_by_operand(instruction, result), result
            else:
                entry = self._put(self._entry_of(instruction, computation.name))
                for inner in _bodies(instruction, entry):
                    self._plan_body(*inner)
                continue
            name, opcode = instruction.name, instruction.opcode
            self._put(
                InstructionPlan(
                    computation=computation.name, name=name, opcode=opcode, operands=operands, result=layout
                )
            )

    # ---- values ------------------------------------------------------------
    def output(
        self,
        value: str,
        instruction: Instruction,
        sharding: TensorSharding,
        *,
        view_of: tuple[int, ...] | None = None,
    ) -> None:
        """Write `value`, an instruction of this program; it reuses the buffer of a parameter of the same name."""
        self._outputs[value] = _Output(value, instruction, sharding, view_of)

    @property
    def is_empty(self) -> bool:
        return not self._outputs

    def finish(self, reuses: Mapping[str, str] | None = None) -> ProgramDraft:
        """The program. reuses: value written → value read that donates its buffer, besides in-place updates."""
        reuses = {**{value: value for value in self._outputs if value in self._parameters}, **(reuses or {})}
        outputs = list(self._outputs.values())
        positions = {value: number for number, value in enumerate(self._parameters)}
        aliases = {number: positions[reuses[o.value]] for number, o in enumerate(outputs) if o.value in reuses}
        back = {parameter: output for output, parameter in aliases.items()}
        root = self._root(outputs)
        mesh = self.layouts.mesh
        return ProgramDraft(
            name=self.name,
            kind=self.kind,
            stage=self.stage,
            chunk=self.chunk,
            module=self._module(root, aliases),
            entries=tuple(self._entries.values()),
            reads=tuple(self._parameters),
            writes=tuple(self._outputs),
            parameters=tuple(
                VariablePlan.from_sharding(
                    v.number, v.name, v.element_type, v.shape, v.sharding, mesh,
                    alias=back.get(v.number), view_of=v.view_of,
                )
                for v in self._variables
            ),
            outputs=tuple(
                VariablePlan.from_sharding(
                    number, o.value, shape.element_type, shape.dimensions, o.sharding, mesh,
                    alias=aliases.get(number), view_of=o.view_of,
                )
                for number, (o, shape) in enumerate(zip(outputs, root.shape.leaves, strict=True))
            ),
        )  # fmt: skip

    def _root(self, outputs: Sequence[_Output]) -> Instruction:
        shapes = tuple(without_layout(output.instruction.shape) for output in outputs)
        root = Instruction("outputs", "tuple", TupleShape(shapes), tuple(o.instruction for o in outputs), is_root=True)
        shardings = tuple(output.sharding for output in outputs)
        self._enter(root, tuple((sharding,) for sharding in shardings), shardings)
        return root

    def _module(self, root: Instruction, aliases: Mapping[int, int]) -> Module:
        parameters = tuple(self._parameters.values())
        entry = Computation(ENTRY, [*parameters, *self._instructions, root], root, parameters, is_entry=True)
        computations = [*self._called, entry]
        name = f"{self.source.name}_{self.name.replace('.', '_')}"
        return Module(name, dict(self._header(parameters, root, aliases)), computations, entry, self.source.tables)

    def _header(
        self, parameters: Sequence[Instruction], root: Instruction, aliases: Mapping[int, int]
    ) -> Iterator[tuple[str, Attribute]]:
        if aliases:
            pairs = ", ".join(f"{{{o}}}: ({p}, {{}}, may-alias)" for o, p in aliases.items())
            yield "input_output_alias", attribute("input_output_alias", f"{{ {pairs} }}")
        shapes = ", ".join(format_shape(parameter.shape) for parameter in parameters)
        layout = f"{{({shapes})->{format_shape(root.shape)}}}"
        yield "entry_computation_layout", attribute("entry_computation_layout", layout)


def _regions(instruction: Instruction) -> Iterator[Computation]:
    for computations in instruction.called.values():
        yield from computations


def _bodies(
    instruction: Instruction, entry: InstructionPlan
) -> Iterator[tuple[Computation, Sequence[ValueSharding], ValueSharding | None]]:
    """Computations run by control flow, each with the layouts of its parameters and of its root."""
    opcode, called = instruction.opcode, instruction.called
    if opcode == "while":
        yield called["condition"][0], entry.operands, None
        yield called["body"][0], entry.operands, entry.result
    elif opcode == "call":
        yield called["to_apply"][0], entry.operands, entry.result
    elif opcode == "conditional":
        branches = [computation for name in CALLING[opcode] for computation in called.get(name, ())]
        for branch, operand in zip(branches, entry.operands[1:], strict=True):
            yield branch, (operand,), entry.result


def group_by_operand(instruction: Instruction, leaves: ValueSharding) -> tuple[ValueSharding, ...]:
    """The layouts of all operands' leaves, operand by operand."""
    groups, first = [], 0
    for operand in instruction.operands:
        count = len(operand.shape.leaves)
        groups.append(leaves[first : first + count])
        first += count
    return tuple(groups)
