"""Divides exponentials by their sums ahead of the product with v: `(e v) / Σ e` becomes `(e / Σ e) v`.

So does what gradients are made of: with l = Σ e, the output u / l where u = e v, and its gradient g,

    (g / l) vᵀ = (g vᵀ) / l;  eᵀ (g / l) = (e / l)ᵀ g;  Σ g ∘ u, over the width, = l · Σ (e / l) ∘ (g vᵀ), over the keys

which is the form that the recognition of attention knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from shardwright.hlo import ArrayShape, Computation, Instruction, Module
from shardwright.planner.attention.axes import CutAxisError, Labels, NoLabelsError, flat
from shardwright.planner.attention.cone import cut_dim, dims_of, label_of, result_labels
from shardwright.planner.attention.flow import Flow, Readers
from shardwright.planner.attention.monomial import Monomial, monomial
from shardwright.planner.attention.operands import scalar, trace_operand
from shardwright.planner.attention.rebuild import Rewritten, rebuild
from shardwright.planner.attention.tuning import MAX_CONE_NODES, MAX_CUTS
from shardwright.planner.attention.write import arranged, converted
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import InstructionWriter, reduction_region

_VIEWS = frozenset({"convert", "copy", "reshape", "transpose"})
_SCALINGS = frozenset({*_VIEWS, "multiply", "divide", "negate"})

_Values = dict[Instruction, Labels]


def divide_first(module: Module, apart: Collection[str] = ()) -> Rewritten | None:
    """`module` with exponentials divided ahead of products, quotients by exponentials; None without any.

    apart: names of exponentials that stay.
    """
    flow, names = Flow(module), edit.Names(module)
    replaced: dict[Instruction, Instruction] = {}
    regions: dict[str, Computation] = {}
    written: dict[Computation, list[tuple[Instruction, list[Instruction]]]] = {}
    quotients: dict[str, str] = {}
    for computation in module.computations:
        readers = Readers(computation, flow)
        for exponentials in _find_summed(computation, flow):
            if exponentials.name in apart:
                continue
            division = _divide(exponentials, readers, names, regions)
            if division is not None:
                replaced.update(division.replaced)
                written.setdefault(computation, []).append((exponentials, division.writer.written))
                quotients[division.probabilities.name] = exponentials.name
    if not quotients:
        return None
    return Rewritten(module=rebuild(module, replaced, written, regions.values()), origins=quotients)


def _find_summed(computation: Computation, flow: Flow) -> list[Instruction]:
    """Values, behind their views, that a sum and a product read."""
    summed: dict[Instruction, None] = {}
    multiplied: set[Instruction] = set()
    for instruction in computation:
        if instruction.opcode == "dot":
            multiplied.update(_behind_views(each, flow) for each in instruction.operands)
        elif _is_sum(instruction):
            summed.setdefault(_behind_views(instruction.operands[0], flow))
    return [each for each in summed if each in multiplied and isinstance(each.shape, ArrayShape) and each.operands]


def _is_sum(instruction: Instruction) -> bool:
    is_reduction = instruction.opcode == "reduce" and len(instruction.operands) == 2
    return is_reduction and instruction.called["to_apply"][0].root.opcode == "add"


def _behind_views(value: Instruction, flow: Flow) -> Instruction:
    value = flow.source(value)
    while value.opcode in _VIEWS:
        value = flow.source(value.operands[0])
    return value


def _divide(
    exponentials: Instruction, readers: Readers, names: edit.Names, regions: dict[str, Computation]
) -> _Division | None:
    cuts: dict[int, tuple[int, ...]] = {}
    for _ in range(MAX_CUTS):
        try:
            labels, sizes = result_labels(exponentials, cuts)
            writer = InstructionWriter(exponentials, names)
            division = _Division(exponentials, labels, sizes, readers, writer, regions)
            return division if division.divide() else None
        except CutAxisError as cut:
            cut_dim(cuts, cut, exponentials)
        except NoLabelsError:
            return None
    return None


@dataclass(slots=True)
class _Product:
    """A product that becomes another: its axes, and those of v in it."""

    dot: Instruction
    labels: Labels
    v: tuple[int, Labels]


@dataclass(slots=True)
class _Division:
    """The division of some exponentials by their sum.

    labels: of the exponentials; sizes: of axes, that of the width among them.
    replaced: values of the program by what stands for them. probabilities: the exponentials' quotient.
    """

    exponentials: Instruction
    labels: Labels
    sizes: dict[str, int]
    readers: Readers
    writer: InstructionWriter
    regions: dict[str, Computation]
    keys: str = ""
    replaced: dict[Instruction, Instruction] = field(default_factory=dict)
    _views: _Values = field(default_factory=dict)
    _powers: dict[Instruction, tuple[Labels, int]] = field(default_factory=dict)
    _sum: tuple[Instruction, Labels] | None = None
    _probabilities: Instruction | None = None

    @property
    def probabilities(self) -> Instruction:
        if self._probabilities is None:
            self._probabilities = self._scale(self.exponentials, self.labels, -1)
        return self._probabilities

    @property
    def flow(self) -> Flow:
        return self.readers.flow

    def divide(self) -> bool:
        """Whether a product of the exponentials is divided by their sum."""
        self._views = self._walk(self.exponentials, self.labels, _VIEWS)
        self._find_sum()
        if self._sum is None:
            return False
        outputs = list(self._outputs())
        if not outputs:
            return False
        self._find_powers()
        scaled = list(self._scaled())
        for output in outputs:
            self._divide_output(output, scaled)
        for quotient, value, labels in scaled:
            if quotient not in self.replaced:
                self._divide_gradient(quotient, value, labels, outputs)
        return bool(self.replaced)

    # ---- what is there ---------------------------------------------------------

    def _walk(self, start: Instruction, start_labels: Labels, through: Collection[str]) -> _Values:
        """What is computed from a value by some operations, with labels."""
        values = {start: start_labels}
        pending = [start]
        while pending and len(values) < MAX_CONE_NODES:
            for reader, place in self.readers.of(pending.pop()):
                if reader.opcode not in through or reader in values or (reader.opcode == "divide" and place == 1):
                    continue
                labels = self._label(reader, values)
                if labels is not None:
                    values[reader] = labels
                    pending.append(reader)
        return values

    def _label(self, reader: Instruction, values: _Values) -> Labels | None:
        """The labels of what reads some values; None where they cannot be told. Raises CutAxisError."""
        try:
            return label_of(reader, values, self.sizes, self.flow)
        except NoLabelsError:
            return None
        except CutAxisError as cut:
            if cut.axis == "e":
                return None
            raise

    def _sums(self, values: _Values) -> Iterator[tuple[Instruction, Labels, str]]:
        """Sums of some values over one axis, with their labels."""
        for value, labels in values.items():
            for reader, place in self.readers.of(value):
                if _is_sum(reader) and place == 0:
                    axes = flat([labels[dim] for dim in reader.get("dimensions")])
                    if len(axes) == 1:
                        yield reader, label_of(reader, values, self.sizes, self.flow), axes[0]

    def _find_sum(self) -> None:
        sums = list(self._sums(self._views))
        if sums and len({(self.flow.number(each), labels) for each, labels, _ in sums}) == 1:
            self._sum, self.keys = sums[0][:2], sums[0][2]
            self._powers = {each: (labels, 1) for each, labels, _ in sums}

    def _outputs(self) -> Iterator[_Product]:
        """Products of exponentials and v."""
        for value, labels in self._views.items():
            for dot, place in self.readers.of(value):
                if dot.opcode != "dot":
                    continue
                product = _label_product(dot, place, labels, self.keys, "e", self.sizes)
                if product is not None:
                    yield product

    def _find_powers(self) -> None:
        """Values that are powers of the sum."""
        pending = list(self._powers)
        while pending:
            for reader, _ in self.readers.of(pending.pop()):
                power = self._power(reader)
                if power is not None and reader not in self._powers:
                    labels = {each: labels for each, (labels, _) in self._powers.items()}
                    self._powers[reader] = (label_of(reader, labels, self.sizes, self.flow), power)
                    pending.append(reader)

    def _power(self, value: Instruction) -> int | None:
        sources = [self.flow.source(each) for each in value.operands]
        powers = [self._powers[each][1] if each in self._powers else None for each in sources]
        if value.opcode in (*_VIEWS, "broadcast"):
            return powers[0]
        if value.opcode not in ("multiply", "divide"):
            return None
        first, second = (
            0 if power is None and scalar(each, self.flow) == 1 else power
            for each, power in zip(sources, powers, strict=True)
        )
        if first is None or second is None:
            return None
        return first + second if value.opcode == "multiply" else first - second

    def _scaled(self) -> Iterator[tuple[Instruction, Instruction, Labels]]:
        """Arrays of rows divided by the sum: each with what is divided, and labels."""
        for power, (labels, exponent) in list(self._powers.items()):
            for reader, place in self.readers.of(power):
                divides = (reader.opcode, exponent) == ("divide", 1) and place == 1
                if (divides or (reader.opcode, exponent) == ("multiply", -1)) and reader not in self._powers:
                    added = [dim for dim, label in enumerate(labels) if label is None]
                    if len(added) == 1 and reader.shape.leaves[0].dimensions[added[0]] == self.sizes.get("e"):
                        whole = tuple(("e",) if label is None else label for label in labels)
                        yield reader, self.flow.source(reader.operands[1 - place]), whole

    # ---- what it becomes -------------------------------------------------------

    def _divide_output(self, output: _Product, scaled: list[tuple[Instruction, Instruction, Labels]]) -> None:
        views = self._walk(output.dot, output.labels, _VIEWS)
        quotients = [(quotient, value) for quotient, value, labels in scaled if views.get(value) == labels]
        if not quotients:
            return
        product = self._with_probabilities(output.dot, 1 - output.v[0])
        for quotient, value in quotients:
            self.replaced[quotient] = self._along(output.dot, value, product)

    def _divide_gradient(
        self, quotient: Instruction, value: Instruction, labels: Labels, outputs: list[_Product]
    ) -> None:
        """Products that read the output's gradient divided by the sum, and sums of it with the output."""
        for view, here in self._walk(quotient, labels, _VIEWS).items():
            for dot, place in self.readers.of(view):
                if dot.opcode != "dot" or dot in self.replaced:
                    continue
                gradient = self._along(quotient, view, value)
                if self._is_of_exponentials(dot, place, here):
                    product = self._with_operand(dot, place, gradient)
                    self.replaced[dot] = self._with_probabilities(product, 1 - place)
                    continue
                product_of_v = _label_product(dot, place, here, "e", self.keys, self.sizes)
                same = [each for each in outputs if product_of_v and self._is_same_v(each, product_of_v)]
                if product_of_v and same:
                    product = self._with_operand(dot, place, gradient)
                    self.replaced[dot] = self._scale(product, product_of_v.labels, -1)
                    self._sum_over_keys(same[0], monomial(value, labels, self.sizes, self.flow), product, product_of_v)

    def _is_of_exponentials(self, dot: Instruction, place: int, labels: Labels) -> bool:
        """Whether a product reads exponentials too, and sums or pairs all axes of the sum."""
        other = self._views.get(self.flow.source(dot.operands[1 - place]))
        dims = dims_of(dot)
        pairs = (*dims.batch, *dims.contracted)
        if other is None or any(labels[pair[place]] != other[pair[1 - place]] for pair in pairs):
            return False
        assert self._sum is not None
        return set(flat(self._sum[1])) <= set(flat([labels[pair[place]] for pair in pairs]))

    def _is_same_v(self, first: _Product, second: _Product) -> bool:
        one, other = (
            trace_operand(each.dot.operands[each.v[0]], each.v[1], self.sizes, self.flow, frozenset())
            for each in (first, second)
        )
        return self.flow.number(one.value) == self.flow.number(other.value) and one.labels == other.labels

    def _sum_over_keys(self, output: _Product, divided: Monomial, product: Instruction, of_v: _Product) -> None:
        """Replace sums over the width of the output and its gradient."""
        assert self._sum is not None
        walk = self._walk(output.dot, output.labels, _SCALINGS)
        numbers = [(self.flow.number(each), tuple(label for label in labels if label)) for each, labels in (
            (output.dot, output.labels), self._sum
        )]  # fmt: skip
        for total, labels, axis in list(self._sums(walk)):
            if axis != "e":
                continue
            summed = self.flow.source(total.operands[0])
            ratio = monomial(summed, walk[summed], self.sizes, self.flow) / divided
            exponents = dict(ratio.exponents)
            exponent = exponents.pop(numbers[1], 0)
            if exponents != {numbers[0]: 1}:
                continue
            element_type = total.shape.leaves[0].element_type
            inner = self._scale(
                converted(self.writer, self._total(product, of_v), element_type), self._sum[1], exponent + 1
            )
            if ratio.factor != 1:
                dims = inner.shape.leaves[0].dimensions
                factor = self.writer.spread(self.writer.constant(element_type, ratio.factor), dims, ())
                inner = self.writer.elementwise("multiply", inner, factor)
            self.replaced[total] = arranged(self.writer, inner, self._sum[1], labels, self.sizes)

    def _total(self, product: Instruction, of_v: _Product) -> Instruction:
        """The sum over keys of probabilities and their gradient, over the axes of the sum."""
        assert self._sum is not None
        element_type = self.probabilities.shape.leaves[0].element_type
        gradient = converted(self.writer, product, element_type)
        gradient = arranged(self.writer, gradient, of_v.labels, self.labels, self.sizes)
        both = self.writer.elementwise("multiply", self.probabilities, gradient)
        name = f"divided.add.{element_type}"
        region = self.regions.setdefault(name, reduction_region(name, "add", element_type))
        place = self.labels.index((self.keys,))
        dims = both.shape.leaves[0].dimensions
        shape = ArrayShape(element_type, dims[:place] + dims[place + 1 :])
        total = self.writer.reduce(shape, region, [place], both, self.writer.constant(element_type, 0.0))
        rest = self.labels[:place] + self.labels[place + 1 :]
        return arranged(self.writer, total, rest, self._sum[1], self.sizes)

    def _with_probabilities(self, dot: Instruction, place: int) -> Instruction:
        """A product with probabilities in the place of exponentials."""
        view = self.flow.source(dot.operands[place])
        return self._with_operand(dot, place, self._along(self.exponentials, view, self.probabilities))

    def _with_operand(self, dot: Instruction, place: int, value: Instruction) -> Instruction:
        operands = [value if number == place else each for number, each in enumerate(dot.operands)]
        return self._copy(dot, operands)

    def _along(self, start: Instruction, end: Instruction, value: Instruction) -> Instruction:
        """The views that lead from `start` to `end`, of another value."""
        path = []
        while end is not start:
            path.append(end)
            end = self.flow.source(end.operands[0])
        for view in reversed(path):
            value = self._copy(view, [value])
        return value

    def _copy(self, value: Instruction, operands: list[Instruction]) -> Instruction:
        copy = self.writer.instruction(value.opcode, value.shape, *operands)
        copy.attributes |= value.attributes
        return copy

    def _scale(self, value: Instruction, labels: Labels, exponent: int) -> Instruction:
        """A value times a power of the sum."""
        assert self._sum is not None
        total, axes = self._sum
        leaf = value.shape.leaves[0]
        target = tuple(tuple(axis for axis in label or () if axis in flat(axes)) for label in labels)
        if any(part and part != label for part, label in zip(target, labels, strict=True)):
            raise NoLabelsError
        along = [dim for dim, part in enumerate(target) if part]
        inner = arranged(self.writer, total, axes, tuple(target[dim] for dim in along), self.sizes)
        spread = self.writer.spread(converted(self.writer, inner, leaf.element_type), leaf.dimensions, along)
        for _ in range(abs(exponent)):
            value = self.writer.elementwise("divide" if exponent < 0 else "multiply", value, spread)
        return value


def _label_product(
    dot: Instruction, place: int, labels: Labels, contracted: str, free: str, sizes: dict[str, int]
) -> _Product | None:
    """A product over one axis of one operand, whose other operand has one axis of its own; None for others."""
    dims = dims_of(dot)
    if flat([labels[pair[place]] for pair in dims.contracted]) != (contracted,):
        return None
    shape = dot.operands[1 - place].shape.leaves[0].dimensions
    own = [dim for dim in dims.free[1 - place] if shape[dim] > 1]
    if len(own) != 1 or sizes.setdefault(free, shape[own[0]]) != shape[own[0]]:
        return None
    pairs = {pair[1 - place]: labels[pair[place]] for pair in (*dims.batch, *dims.contracted)}
    other = tuple(pairs.get(dim, (free,) if dim in own else ()) for dim in range(len(shape)))
    sides = [[labels[dim] for dim in dims.free[place]], [other[dim] for dim in dims.free[1 - place]]]
    ordered = sides if place == 0 else sides[::-1]
    result = (*(labels[pair[place]] for pair in dims.batch), *ordered[0], *ordered[1])
    return _Product(dot, result, (1 - place, other))
