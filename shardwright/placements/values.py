"""Which values of a module lie on the host.

A call says so of one value (`call`); XLA's HostOffloader (xla/hlo/transforms/host_offloader.cc) follows it to all that
share its memory, and so does this:

- elements of tuples, barriers, loops (the initial value, the parameter, the next value, the result), branches, views;
- a `dynamic-update-slice` of a value on the host: what it updates lies there, too, as residuals that a scan stacks;
- a `dynamic-slice` of a value on the host is a part of it, until a call moves it to the device.

Arguments and results lie where their layouts say: `S(5)` in `entry_computation_layout`, which is where the client
leaves the memory kinds of a step's arguments. JAX's text says nothing of arguments that were given as bare types. Of a
program that leaves a result on the host, arguments that are only ever moved to the device lie there, too: its state,
that comes back where it is left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, Shape, TupleShape
from shardwright.hlo.attributes import parse_value
from shardwright.hlo.entry import flat_aliases, format_aliases
from shardwright.hlo.ir import Attribute
from shardwright.hlo.shape_text import ShapeReader, format_shape
from shardwright.hlo.shapes import HOST_SPACE, BufferShape
from shardwright.placements.call import DEVICE, HOST, check_placements, place, read_placement
from shardwright.placements.compute import computes_on_host
from shardwright.reserved_names import IDENTITY_TARGETS, PLACEMENT_TARGET

#: An instruction and the number of an array leaf of its result.
Value = tuple[Instruction, int]

_LAYOUT = "entry_computation_layout"

_COMMENT = re.compile(r"/\*[^*]*\*/")

#: Their result is their operand, leaf by leaf, in its memory.
_SAME = frozenset({"bitcast", "reshape", "copy", "optimization-barrier", "opt-barrier", "domain", "add-dependency"})

#: Made where they are read: each reader has its own.
_MADE_ANYWHERE = frozenset({"broadcast", "constant", "iota"})

#: Parts of their first operand.
_PARTS = frozenset({"dynamic-slice", "slice"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostValues:
    """What of a module lies on the host.

    arguments / results: flat numbers of the entry's. values: all of them, those in between, too.
    """

    arguments: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    values: frozenset[Value] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.values)


def says_of_memory(module: Module) -> bool:
    """Whether a module says anything of the host's memory."""
    if _LAYOUT in module.header and HOST_SPACE in module.header[_LAYOUT].text:
        return True
    return any(
        instruction.get("custom_call_target") == PLACEMENT_TARGET
        or any(leaf.is_on_host for leaf in instruction.shape.leaves)
        for instruction in module.instructions()
    )


def read_boundary(module: Module) -> tuple[frozenset[int], frozenset[int]]:
    """Flat numbers of the arguments and of the results whose layouts say that they lie on the host."""
    arguments = {n for n, leaf in enumerate(_parameter_leaves(module.entry)) if leaf.is_on_host}
    results = {n for n, leaf in enumerate(module.entry.root.shape.leaves) if leaf.is_on_host}
    text = module.header[_LAYOUT].text if _LAYOUT in module.header else ""
    if HOST_SPACE in text:
        inside = _COMMENT.sub("", text).strip().removeprefix("{").removesuffix("}")
        reader = ShapeReader(inside)
        given, end = reader.read(0)
        result, _ = reader.read(inside.index("->", end) + 2)
        arguments |= {n for n, leaf in enumerate(given.leaves) if leaf.is_on_host}
        results |= {n for n, leaf in enumerate(result.leaves) if leaf.is_on_host}
    return frozenset(arguments), frozenset(results)


def write_boundary(text: str, arguments: Collection[int], results: Collection[int]) -> str:
    """A module's text, with `S(5)` in the layouts of some of its arguments and results, by flat number."""
    if not arguments and not results:
        return text
    header, end_of_line, rest = text.partition("\n")
    before, key, after = header.partition(f"{_LAYOUT}={{")
    if not key:
        return text
    after = _COMMENT.sub("", after)
    reader = ShapeReader(after)
    given, end = reader.read(0)
    result, behind = reader.read(after.index("->", end) + 2)
    given, result = _on_host(given, sorted(arguments)), _on_host(result, sorted(results))
    return f"{before}{key}{format_shape(given)}->{format_shape(result)}{after[behind:]}{end_of_line}{rest}"


def place_results(module: Module) -> Module:
    """The module with a call on each result that lies on the host by its layout alone; itself where there is none."""
    _, results = read_boundary(module)
    found = find_host_values(module) if results else HostValues()
    lacking = results - found.results
    entry = module.entry
    if not lacking or entry.root.opcode != "tuple" or len(entry.root.operands) != len(entry.root.shape.leaves):
        if lacking and isinstance(entry.root.shape, ArrayShape):
            return _with_entry(module, entry, *_placed_root(module, entry))
        return module
    old, used = entry.root, {instruction.name for instruction in module.instructions()}
    calls = {n: place(old.operands[n], HOST, _unused(f"{old.name}.host{n}", used)) for n in sorted(lacking)}
    operands = tuple(calls.get(n, operand) for n, operand in enumerate(old.operands))
    root = Instruction(old.name, "tuple", old.shape, operands, dict(old.attributes), is_root=True, line=old.line)
    others = [instruction for instruction in entry if instruction is not old]
    return _with_entry(module, entry, [*others, *calls.values(), root], root)


def fetch_arguments(module: Module, arguments: Collection[int]) -> Module:
    """The module with a call that fetches an argument from the host, where instructions of the entry compute with it as
    it is: JAX leaves `jax.device_put(x, jax.memory.Space.Device)` out of texts that name no other memory.

    arguments: flat numbers of those that lie there, each an array of its own. Itself where nothing is to be fetched.
    """
    entry = module.entry
    parameters = sorted(entry.parameters, key=lambda parameter: parameter.index)
    is_flat = all(isinstance(parameter.shape, ArrayShape) for parameter in parameters)
    on_host = {parameters[number] for number in arguments if number < len(parameters)} if is_flat else set()
    readers = {reader for reader in entry if _computes(reader) and not on_host.isdisjoint(reader.operands)}
    if not readers:
        return module
    used = {instruction.name for instruction in module.instructions()}
    copies: dict[Instruction, Instruction] = {}
    fetched: dict[Instruction, Instruction] = {}
    instructions: list[Instruction] = []
    for old in entry:
        for operand in old.operands if old in readers else ():
            if operand in on_host and operand not in fetched:
                call = place(copies[operand], DEVICE, _unused(f"{operand.name}.fetched", used))
                fetched[operand] = call
                instructions.append(call)
        here = fetched if old in readers else {}
        operands = tuple([here.get(operand) or copies[operand] for operand in old.operands])
        copies[old] = Instruction(
            old.name, old.opcode, old.shape, operands, old.attributes, old.called, old.payload, old.index, old.is_root,
            old.line,
        )  # fmt: skip
        instructions.append(copies[old])
    return _with_entry(module, entry, instructions, copies[entry.root])


def _computes(instruction: Instruction) -> bool:
    """Whether an instruction computes with its operands on the device, rather than handing them on."""
    return not (
        _hands_on(instruction)
        or read_placement(instruction) is not None
        or computes_on_host(instruction)
        or instruction.opcode in _PARTS
        or instruction.opcode == "dynamic-update-slice"
    )


def _placed_root(module: Module, entry: Computation) -> tuple[list[Instruction], Instruction]:
    before = entry.root
    before.is_root = False
    root = place(before, HOST, _unused(f"{before.name}.host", {each.name for each in module.instructions()}))
    root.is_root = True
    return [*entry, root], root


def _unused(name: str, used: Collection[str]) -> str:
    while name in used:
        name += "_"
    return name


def _with_entry(module: Module, entry: Computation, instructions: list[Instruction], root: Instruction) -> Module:
    parameters = tuple(sorted((i for i in instructions if i.opcode == "parameter"), key=lambda i: i.index))
    made = Computation(entry.name, instructions, root, parameters, entry.is_entry, entry.attributes)
    others = [made if computation is entry else computation for computation in module.computations]
    return Module(module.name, module.header, others, made, module.tables)


def find_host_values(module: Module, arguments: Collection[int] = ()) -> HostValues:
    """What of a module lies on the host. arguments: flat numbers of those that are known to.

    Raises UnsupportedProgramError at a call that names no known memory.
    """
    if not arguments and not says_of_memory(module):
        return HostValues()
    check_placements(module)
    return _Finder(module, frozenset(arguments) | read_boundary(module)[0]).find()


def drop_torn_aliases(module: Module, found: HostValues) -> Module:
    """The module without aliases between an argument and a result that lie in different memories: XLA refuses them,
    and JAX does not donate such arguments. Itself where there is none."""
    aliases = flat_aliases(module)
    kept = {
        result: argument
        for result, argument in aliases.items()
        if (result in found.results) == (argument in found.arguments)
    }
    if len(kept) == len(aliases):
        return module
    header = dict(module.header)
    del header["input_output_alias"]
    if kept:
        text = format_aliases(module, kept)
        header["input_output_alias"] = Attribute("input_output_alias", text, parse_value("input_output_alias", text))
    return Module(module.name, header, module.computations, module.entry, module.tables)


def mark_host_values(module: Module, found: HostValues) -> Module:
    """The module with `S(5)` in the layout of every value that lies on the host; itself where all have it."""
    if all(instruction.shape.leaves[leaf].is_on_host for instruction, leaf in found.values):
        return module
    shapes: dict[tuple[Shape, tuple[int, ...]], Shape] = {}  # equal shapes stay one object
    leaves_by_instruction: dict[Instruction, list[int]] = defaultdict(list)
    for instruction, leaf in found.values:
        leaves_by_instruction[instruction].append(leaf)
    copies: dict[Instruction, Instruction] = {}
    computations: dict[Computation, Computation] = {}
    for computation in module.computations:
        for old in computation:
            shape, leaves = old.shape, leaves_by_instruction.get(old)
            if leaves:
                key = (shape, tuple(sorted(leaves)))
                shape = shapes.setdefault(key, _on_host(shape, key[1]))
            called = {
                name: tuple(computations.get(each, each) for each in callees) for name, callees in old.called.items()
            }
            copies[old] = Instruction(
                old.name, old.opcode, shape, tuple([copies[operand] for operand in old.operands]),
                old.attributes, called, old.payload, old.index, old.is_root, old.line,
            )  # fmt: skip
        computations[computation] = Computation(
            computation.name, [copies[old] for old in computation], copies[computation.root],
            tuple(copies[parameter] for parameter in computation.parameters), computation.is_entry,
            computation.attributes,
        )  # fmt: skip
    entry = computations[module.entry]
    header = dict(module.header)
    arguments = ", ".join(format_shape(parameter.shape) for parameter in entry.parameters)
    text = f"{{({arguments})->{format_shape(entry.root.shape)}}}"
    header[_LAYOUT] = Attribute(_LAYOUT, text, parse_value(_LAYOUT, text))
    return Module(module.name, header, list(computations.values()), entry, module.tables)


def _on_host(shape: Shape, leaves: Sequence[int]) -> Shape:
    numbers = iter(range(len(shape.leaves)))

    def convert(part: Shape) -> Shape:
        if isinstance(part, TupleShape):
            return TupleShape(tuple(convert(element) for element in part.elements))
        if isinstance(part, ArrayShape):
            return part.on_host() if next(numbers) in leaves else part
        if isinstance(part, BufferShape):
            next(numbers)
        return part

    return convert(shape)


def _parameter_leaves(entry: Computation) -> list[ArrayShape]:
    parameters = sorted(entry.parameters, key=lambda parameter: parameter.index)
    return [leaf for parameter in parameters for leaf in parameter.shape.leaves]


@dataclass(slots=True)
class _Memories:
    """Values that share one memory, as disjoint sets."""

    parents: dict[Value, Value] = field(default_factory=dict)

    def of(self, value: Value) -> Value:
        root = value
        while (parent := self.parents.get(root, root)) != root:
            root = parent
        while (parent := self.parents.get(value, value)) != root:
            self.parents[value], value = root, parent
        return root

    def join(self, a: Value, b: Value) -> None:
        first, second = self.of(a), self.of(b)
        if first != second:
            self.parents[second] = first


class _Finder:
    """Joins what shares memory, then lets the host spread through parts and updates."""

    def __init__(self, module: Module, arguments: frozenset[int]) -> None:
        self.module = module
        self.memories = _Memories()
        self.parameters = [
            (parameter, leaf)
            for parameter in sorted(module.entry.parameters, key=lambda parameter: parameter.index)
            for leaf in range(len(parameter.shape.leaves))
        ]
        self.host: set[Value] = set()
        self.given = arguments

    def find(self) -> HostValues:
        for instruction in self.module.instructions():
            self._join(instruction)
        self._spread(self._seeds())
        root = self.module.entry.root
        if any(self._is_host((root, leaf)) for leaf in range(len(root.shape.leaves))):
            self._spread({self.memories.of(value) for value in self._only_moved_in()})
        values = {
            (instruction, leaf)
            for instruction in self.module.instructions()
            for leaf in range(len(instruction.shape.leaves))
            if self._is_host((instruction, leaf))
        }
        values |= set(self._made_on_host())
        return HostValues(
            arguments=frozenset(n for n, value in enumerate(self.parameters) if value in values),
            results=frozenset(leaf for leaf in range(len(root.shape.leaves)) if (root, leaf) in values),
            values=frozenset(values),
        )

    def _is_host(self, value: Value) -> bool:
        return self.memories.of(value) in self.host

    def _seeds(self) -> set[Value]:
        seeds = {self.memories.of(self.parameters[number]) for number in self.given if number < len(self.parameters)}
        for instruction in self.module.instructions():
            placement = read_placement(instruction)
            if placement is not None and placement.is_to_host:
                seeds.add(self.memories.of((instruction, 0)))
            elif placement is None:
                seeds |= {
                    self.memories.of((instruction, leaf))
                    for leaf, shape in enumerate(instruction.shape.leaves)
                    if shape.is_on_host
                }
        return seeds

    def _spread(self, seeds: set[Value]) -> None:
        """The host's values are those of `seeds`, and what shares memory with their parts and updates."""
        self.host |= seeds
        steps = [i for i in self.module.instructions() if i.opcode in _PARTS or i.opcode == "dynamic-update-slice"]
        has_changed = True
        while has_changed:
            has_changed = False
            for instruction in steps:
                source = instruction.operands[1 if instruction.opcode == "dynamic-update-slice" else 0]
                target = self.memories.of((instruction, 0))
                if target not in self.host and self._is_host((source, 0)):
                    self.host.add(target)
                    has_changed = True

    def _only_moved_in(self) -> Iterator[Value]:
        """Arguments that are only ever moved to the device."""
        readers: dict[Value, list[tuple[Instruction, Value]]] = defaultdict(list)
        for instruction in self.module.instructions():
            for value in _operand_values(instruction):
                readers[self.memories.of(value)].append((instruction, value))
        for parameter in self.parameters:
            if not self._is_host(parameter) and self._is_only_moved(self.memories.of(parameter), readers):
                yield parameter

    def _is_only_moved(
        self, memory: Value, readers: Mapping[Value, Sequence[tuple[Instruction, Value]]], depth: int = 0
    ) -> bool:
        is_moved = False
        for reader, _ in readers.get(memory, ()):
            placement = read_placement(reader)
            if placement is not None:
                if placement.is_to_host:
                    return False
                is_moved = True
            elif reader.opcode in _PARTS and reader.operands and depth < 2:
                if not self._is_only_moved(self.memories.of((reader, 0)), readers, depth + 1):
                    return False
                is_moved = True
            elif not _hands_on(reader):
                return False
        return is_moved

    def _made_on_host(self) -> Iterator[Value]:
        """What is made anywhere, and only read as values on the host."""
        readers: dict[Instruction, list[Value]] = defaultdict(list)
        for instruction in self.module.instructions():
            start = 0
            for number, operand in enumerate(instruction.operands):
                if operand.opcode in _MADE_ANYWHERE and len(operand.shape.leaves) == 1:
                    is_update = instruction.opcode == "dynamic-update-slice" and number == 0
                    is_handed = is_update or _hands_on(instruction)
                    leaf = start if instruction.opcode == "tuple" else 0
                    readers[operand].append((instruction, leaf) if is_handed else (operand, 0))
                start += len(operand.shape.leaves)
        for made, users in readers.items():
            if made.shape.leaves[0].rank and all(user[0] is not made and self._is_host(user) for user in users):
                yield made, 0

    # ---- what shares memory --------------------------------------------------

    def _join(self, instruction: Instruction) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "tuple":
            start = 0
            for operand in operands:
                self._join_leaves(operand, 0, instruction, start)
                start += len(operand.shape.leaves)
        elif opcode == "get-tuple-element":
            self._join_leaves(operands[0], _first_leaf(operands[0].shape, instruction.index), instruction, 0)
        elif opcode == "while":
            (body,), (condition,) = instruction.called["body"], instruction.called["condition"]
            for other in (operands[0], body.parameters[0], body.root, condition.parameters[0]):
                self._join_leaves(instruction, 0, other, 0)
        elif opcode == "call":
            (callee,) = instruction.called["to_apply"]
            for operand, parameter in zip(operands, callee.parameters, strict=False):
                self._join_leaves(operand, 0, parameter, 0)
            self._join_leaves(callee.root, 0, instruction, 0)
        elif opcode == "conditional":
            names = ("branch_computations", "true_computation", "false_computation")
            branches = [branch for name in names for branch in instruction.called.get(name, ())]
            for operand, branch in zip(operands[1:], branches, strict=False):
                self._join_leaves(operand, 0, branch.parameters[0], 0)
                self._join_leaves(branch.root, 0, instruction, 0)
        elif opcode in _SAME or opcode == "dynamic-update-slice" or _is_annotation(instruction):
            self._join_leaves(operands[0], 0, instruction, 0)

    def _join_leaves(self, a: Instruction, a_first: int, b: Instruction, b_first: int) -> None:
        if a.opcode in _MADE_ANYWHERE or b.opcode in _MADE_ANYWHERE:
            return
        count = min(len(a.shape.leaves) - a_first, len(b.shape.leaves) - b_first)
        for leaf in range(count):
            self.memories.join((a, a_first + leaf), (b, b_first + leaf))


def _is_annotation(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and instruction.get("custom_call_target") in IDENTITY_TARGETS


def _hands_on(instruction: Instruction) -> bool:
    """Whether an instruction only hands its operands on, in their memory."""
    return (
        instruction.opcode in _SAME
        or instruction.opcode in ("tuple", "get-tuple-element", "while", "call", "conditional")
        or _is_annotation(instruction)
    )


def _first_leaf(shape: Shape, index: int) -> int:
    assert isinstance(shape, TupleShape)
    return sum(len(element.leaves) for element in shape.elements[:index])


def _operand_values(instruction: Instruction) -> Iterator[Value]:
    if instruction.opcode == "get-tuple-element":
        first = _first_leaf(instruction.operands[0].shape, instruction.index)
        for leaf in range(len(instruction.shape.leaves)):
            yield instruction.operands[0], first + leaf
        return
    for operand in instruction.operands:
        for leaf in range(len(operand.shape.leaves)):
            yield operand, leaf
