"""Reads the attention around one product of scores: its operands, axes, mask, and what its results become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from shardwright.hlo import Instruction
from shardwright.planner.attention.axes import (
    CutAxisError,
    Label,
    Labels,
    NoLabelsError,
    flat,
    permuted,
    reshape_labels,
)
from shardwright.planner.attention.cone import Cone, cut_dim, dims_of, grow
from shardwright.planner.attention.flow import Flow, Readers
from shardwright.planner.attention.masks import Mask, Masks
from shardwright.planner.attention.operands import Operand, scalar, trace_operand
from shardwright.planner.attention.probe import Probed, probe
from shardwright.planner.attention.tuning import MAX_CUTS
from shardwright.planner.attention.whole import WholeValues

#: Traces an operand with given labels.
_Trace = Callable[[Instruction, Labels], Operand]


class LeftAloneError(Exception):
    """An attention that stays written out: why."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one result of the kernel becomes.

    role: `out`, `dq`, `dk`, `dv` or `dbias`.
    instead_of: the instruction whose value it is, by `factor`.
    labels: of that value's dimensions.
    """

    role: str
    instead_of: Instruction
    labels: Labels
    factor: float


@dataclass(slots=True)
class Attention:
    """An attention as a program writes it out.

    batch, heads, groups, rows, keys, width, value_width: axes; query heads are `heads` and within them `groups`, which
        share a key head; gradient: the gradient of the output.
    logits: the softmax's operand; slope: of it, by scores.
    hidden, hidden_gradient: what probabilities and gradients of scores are in rows that see no key
        (`softmax.kind_of`); empty where no row is told to be one.
    """

    cone: Cone
    sizes: dict[str, int]
    q: Operand
    k: Operand
    v: Operand
    dout: Operand | None
    batch: Label
    heads: Label
    groups: Label
    rows: str
    width: Label
    value_width: Label
    scale: float
    slope: float
    logits: Instruction
    mask: Mask
    varying: Label
    hidden: str
    hidden_gradient: str
    results: list[Result] = field(default_factory=list)

    @property
    def keys(self) -> str:
        return self.cone.keys[0]

    def size(self, label: Label) -> int:
        return prod(self.sizes[axis] for axis in label)


def recognise(product: Instruction, readers: Readers, whole: WholeValues, masks: Masks) -> Attention | None:
    """The attention whose scores a product makes; None for a product of another kind. Raises LeftAloneError."""
    cuts: dict[int, tuple[int, ...]] = {}
    for _ in range(MAX_CUTS):
        try:
            cone = grow(product, readers, cuts)
            if not cone.keys or not cone.ends:
                return None
            probed = probe(cone, readers, whole)
            if probed is None:
                return None
            if isinstance(probed, str):
                raise LeftAloneError(probed)
            return _Reader(cone, probed, readers, masks).read()
        except CutAxisError as cut:
            cut_dim(cuts, cut, product)
        except NoLabelsError:
            return None
    return None


class _Reader:
    def __init__(self, cone: Cone, probed: Probed, readers: Readers, masks: Masks) -> None:
        self._cone, self._probed, self._readers, self._masks = cone, probed, readers, masks
        self._flow: Flow = readers.flow
        self._sizes = dict(cone.sizes)

    def read(self) -> Attention:
        cone = self._cone
        if any(each.opcode == "dynamic-update-slice" for each in cone.escapes):
            raise LeftAloneError("a loop keeps arrays of rows × keys for its backward loop: checkpoint its body")
        if cone.escapes:
            raise LeftAloneError(f"what is computed from its scores is read by {cone.escapes[0].name} too")
        q_side, q_labels, k_labels = self._score_operands()
        product = cone.product
        shared = set(flat(q_labels)) & set(flat(k_labels)) - {axis for axis in self._sizes if axis[0] == "d"}
        free = [axis for axis in flat(q_labels) if axis in cone.sizes and axis not in shared]
        rows = self._rows(free)
        for heads in (frozenset(shared), frozenset[str]()):
            trace = partial(trace_operand, sizes=self._sizes, flow=self._flow, heads=heads)
            q = self._trace(product.operands[q_side], q_labels)
            k = trace(product.operands[1 - q_side], k_labels)
            attention = self._operands(q, k, rows, shared, trace)
            if attention is not None:
                return attention
        raise LeftAloneError("its keys' and values' heads are repeated in different ways")

    def _score_operands(self) -> tuple[int, Labels, Labels]:
        """Which operand of the scores is q, and the labels of q and k."""
        cone = self._cone
        sides = self._label_operands(cone.product, cone.labels[cone.product], "d")
        with_keys = [side for side in (0, 1) if set(cone.keys) <= set(flat(sides[side]))]
        if len(with_keys) != 1:
            raise LeftAloneError("rows and keys are axes of the same operand")
        k_side = with_keys[0]
        rest = set(flat(sides[k_side])) - set(flat(sides[1 - k_side])) - set(cone.keys)
        if rest or len(cone.keys) != 1:
            raise LeftAloneError("k has more axes than keys and width")
        return 1 - k_side, sides[1 - k_side], sides[k_side]

    def _label_operands(self, dot: Instruction, result: Labels, contracted: str) -> tuple[Labels, Labels]:
        """Labels of a product's operands from those of its result; contracted ones are new axes."""
        dims = dims_of(dot)
        shapes = [operand.shape.leaves[0].dimensions for operand in dot.operands]
        labels: list[list[Label | None]] = [[None] * len(shape) for shape in shapes]
        for place, pair in enumerate(dims.batch):
            labels[0][pair[0]] = labels[1][pair[1]] = result[place]
        place = len(dims.batch)
        for side in (0, 1):
            for dim in dims.free[side]:
                labels[side][dim] = result[place]
                place += 1
        number = 0
        for pair in dims.contracted:
            size = shapes[0][pair[0]]
            label: Label = ()
            if size > 1:
                label = (f"{contracted}{number}",)
                self._sizes[label[0]] = size
                number += 1
            labels[0][pair[0]] = labels[1][pair[1]] = label
        return tuple(labels[0]), tuple(labels[1])

    def _label_other(self, dot: Instruction, place: int, free: str) -> tuple[Labels, Labels, Label]:
        """Labels of the other operand of an end and of its result, and what is contracted. free: of new axes."""
        dims = dims_of(dot)
        here = self._cone.labels[self._flow.source(dot.operands[place])]
        shape = dot.operands[1 - place].shape.leaves[0].dimensions
        other: list[Label | None] = [None] * len(shape)
        for pair in (*dims.batch, *dims.contracted):
            other[pair[1 - place]] = here[pair[place]]
        number = 0
        for dim in dims.free[1 - place]:
            label: Label = ()
            if shape[dim] > 1:
                label = (f"{free}{number}",)
                if self._sizes.setdefault(label[0], shape[dim]) != shape[dim]:
                    raise LeftAloneError("its gradients are of another width")
                number += 1
            other[dim] = label
        sides: list[list[Label | None]] = [[], []]
        sides[place] = [here[dim] for dim in dims.free[place]]
        sides[1 - place] = [other[dim] for dim in dims.free[1 - place]]
        result = [*(here[pair[place]] for pair in dims.batch), *sides[0], *sides[1]]
        return tuple(other), tuple(result), flat([here[pair[place]] for pair in dims.contracted])

    def _rows(self, free: list[str]) -> str:
        """Which of q's own axes is the rows: the one along which the mask differs, else the longest."""
        if not free:
            raise LeftAloneError("it has one row")
        masked = [axis for axis in free if axis in self._probed.varying]
        candidates = masked if len(masked) == 1 else free
        return max(candidates, key=lambda axis: self._sizes[axis])

    def _operands(self, q: Operand, k: Operand, rows: str, shared: set[str], trace: _Trace) -> Attention | None:
        """The attention with these operands; None where heads are not repeated alike."""
        probed = self._probed
        outputs, v = self._outputs(rows, trace)
        product = probed.gradient_product
        dout, factors = None, 1.0
        results: list[Result | None] = list(outputs)
        backward = self._value_gradients(rows)
        if product is not None:
            v_again, dout, factors = self._gradient_operands(*product, trace)
            v = v or v_again
            self._require_same(v, v_again, "v")
        elif backward:
            dot, place = backward[0]
            labels, _, _ = self._label_other(dot, place, "e")
            dout = self._trace(dot.operands[1 - place], labels)
        if v is None:
            raise LeftAloneError("nothing is multiplied with its probabilities")
        if k.repeated != v.repeated:
            return None
        if self._depends(v.value, {dot for dot, _ in backward}):
            raise LeftAloneError("its softmax runs over rows")
        groups = (*(a for a in flat(q.labels) if a in self._cone.sizes and a not in shared and a != rows), *k.repeated)
        batch, heads = _batch_and_heads(q, rows, shared - set(k.repeated))
        if {*heads, *groups}.intersection(k.axes) != {*heads, *groups}.intersection(v.axes):
            raise LeftAloneError("its keys have other heads than its values")
        scale = probed.slope * q.factor * k.factor
        for dot, place in backward:
            results += self._value_gradient(dot, place, dout, k.repeated)
        for dot, place, factor in probed.gradients:
            results += self._score_gradient(dot, place, factor * factors / scale, q, k, trace)
        results += self._bias_gradients(batch, rows, factors)
        whole_results = [result for result in results if result is not None]
        if len(whole_results) < len(results):
            return None
        return Attention(
            cone=self._cone,
            sizes=self._sizes,
            q=q,
            k=k,
            v=v,
            dout=dout,
            batch=batch,
            heads=heads,
            groups=groups,
            rows=rows,
            width=tuple(axis for axis in q.axes if axis[0] == "d"),
            value_width=tuple(axis for axis in v.axes if axis[0] == "e"),
            scale=scale,
            slope=probed.slope,
            logits=probed.logits,
            mask=self._masks.find(self._cone, probed.logits, rows),
            varying=probed.varying,
            hidden=_only(probed.hidden),
            hidden_gradient=_only(probed.hidden_gradients),
            results=whole_results,
        )

    def _outputs(self, rows: str, trace: _Trace) -> tuple[list[Result], Operand | None]:
        """Products of probabilities and v."""
        results: list[Result] = []
        v: Operand | None = None
        for dot, place in self._probed.outputs:
            labels, result, contracted = self._label_other(dot, place, "e")
            if contracted != self._cone.keys:
                continue
            here = trace(dot.operands[1 - place], labels)
            v = v or here
            self._require_same(v, here, "v")
            results.append(Result("out", dot, result, here.factor))
        return results, v

    def _value_gradients(self, rows: str) -> list[tuple[Instruction, int]]:
        """Products of probabilities that sum over rows."""
        ends = []
        for dot, place in self._probed.outputs:
            _, _, contracted = self._label_other(dot, place, "e")
            if rows in contracted:
                ends.append((dot, place))
            elif contracted != self._cone.keys:
                raise LeftAloneError(f"its probabilities are read by {dot.name} too")
        return ends

    def _value_gradient(
        self, dot: Instruction, place: int, dout: Operand | None, repeated: Label
    ) -> list[Result | None]:
        labels, result, _ = self._label_other(dot, place, "e")
        here = self._trace(dot.operands[1 - place], labels)
        assert dout is not None
        self._require_same(dout, here, "the output's gradient")
        return [self._reduced(Result("dv", dot, result, here.factor), repeated)]

    def _gradient_operands(self, product: Instruction, labels: Labels, trace: _Trace) -> tuple[Operand, Operand, float]:
        """v and the output's gradient as the gradient of the probabilities reads them, and their factors."""
        sides = self._label_operands(product, labels, "e")
        k_side = 0 if self._cone.keys[0] in flat(sides[0]) else 1
        v = trace(product.operands[k_side], sides[k_side])
        dout = self._trace(product.operands[1 - k_side], sides[1 - k_side])
        return v, dout, v.factor * dout.factor

    def _score_gradient(
        self, dot: Instruction, place: int, factor: float, q: Operand, k: Operand, trace: _Trace
    ) -> list[Result | None]:
        labels, result, contracted = self._label_other(dot, place, "d")
        if contracted == self._cone.keys:
            here = trace(dot.operands[1 - place], labels)
            self._require_same(k, here, "k")
            return [Result("dq", dot, result, factor * here.factor)]
        here = self._trace(dot.operands[1 - place], labels)
        self._require_same(q, here, "q")
        return [self._reduced(Result("dk", dot, result, factor * here.factor), k.repeated)]

    def _bias_gradients(self, batch: Label, rows: str, factors: float) -> list[Result]:
        results = []
        for reduction, factor in self._probed.sums:
            inner = self._cone.labels[self._flow.source(reduction.operands[0])]
            dims = reduction.get("dimensions")
            if set(flat([inner[dim] for dim in dims])) != set(batch):
                raise LeftAloneError("its bias has a gradient that is summed over heads or rows")
            labels = tuple(label for dim, label in enumerate(inner) if dim not in dims)
            results.append(Result("dbias", reduction, labels, factor * factors))
        return results

    def _reduced(self, result: Result, repeated: Label) -> Result | None:
        """A gradient of k or v, behind the sum over query heads that share a key head; None where there is none."""
        repeated = tuple(axis for axis in repeated if axis in flat(result.labels))
        if not repeated:
            return result
        operand = Operand(result.instead_of, result.labels)
        while True:
            readers = self._readers.of(operand.value)
            if len(readers) != 1:
                return None
            ((reader, _),) = readers
            labels = self._forward(reader, operand)
            if labels is None:
                return None
            if reader.opcode in ("multiply", "divide"):
                others = [each for each in reader.operands if self._flow.source(each) is not operand.value]
                number = scalar(others[0], self._flow) if len(others) == 1 else None
                if not number or (reader.opcode == "divide" and others[0] is reader.operands[0]):
                    return None
                result = replace(result, factor=result.factor * (1 / number if reader.opcode == "divide" else number))
            if reader.opcode == "reduce":
                inner = operand.labels
                dims = reader.get("dimensions")
                is_sum = reader.called["to_apply"][0].root.opcode == "add"
                if not is_sum or set(flat([inner[dim] for dim in dims])) != set(repeated):
                    return None
                return Result(result.role, reader, labels, result.factor)
            operand = Operand(reader, labels)

    def _forward(self, reader: Instruction, operand: Operand) -> Labels | None:
        source = operand.value.shape.leaves[0].dimensions
        if reader.opcode in ("convert", "copy", "multiply", "divide"):
            return operand.labels
        if reader.opcode == "transpose":
            return permuted(operand.labels, reader.get("dimensions"))
        if reader.opcode == "reshape":
            return reshape_labels(operand.labels, source, reader.shape.leaves[0].dimensions, self._sizes)
        if reader.opcode == "reduce" and len(reader.operands) == 2:
            return tuple(label for dim, label in enumerate(operand.labels) if dim not in reader.get("dimensions"))
        return None

    def _trace(self, value: Instruction, labels: Labels) -> Operand:
        """An operand that is not repeated."""
        return trace_operand(value, labels, self._sizes, self._flow, frozenset())

    def _depends(self, value: Instruction, on: set[Instruction]) -> bool:
        """Whether a value is computed from others of its computation."""
        position = self._readers.position
        first = min((position[each] for each in on), default=len(position))
        pending, visited = [value], {value}
        while pending:
            here = pending.pop()
            if here in on:
                return True
            for operand in here.operands:
                if operand not in visited and position[operand] >= first:
                    visited.add(operand)
                    pending.append(operand)
        return False

    def _require_same(self, first: Operand | None, second: Operand, name: str) -> None:
        assert first is not None
        same = self._flow.number(first.value) == self._flow.number(second.value)
        if not same or first.labels != second.labels or first.repeated != second.repeated:
            raise LeftAloneError(f"its backward pass reads another {name}")


def _only(kinds: set[str]) -> str:
    if len(kinds) > 1:
        raise LeftAloneError("its rows that see no key are not all alike")
    return next(iter(kinds), "")


def _batch_and_heads(q: Operand, rows: str, shared: set[str]) -> tuple[Label, Label]:
    """The axes that q and k share, told into batch and heads by their places in q."""
    place = next(dim for dim, label in enumerate(q.labels) if rows in (label or ()))
    dims = [tuple(axis for axis in label or () if axis in shared or axis == rows) for label in q.labels]
    here = dims[place].index(rows)
    before = [label for label in [*dims[:place], dims[place][:here]] if label]
    after = flat([dims[place][here + 1 :], *dims[place + 1 :]])
    has_unit = () in q.labels[:place]  # a batch of one
    if after:
        is_told = before or (has_unit and len(after) == 1)
        return (flat(before), after) if is_told else (after[:1], after[1:])
    if len(before) == 1 and not has_unit:
        before = [before[0][:-1], before[0][-1:]] if len(before[0]) > 1 else [before[0], ()]
    return flat(before[:-1]), flat(before[-1:])
