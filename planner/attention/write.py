"""Writes an attention's calls, its bias, and the views between them and the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.attention import HIDDEN_BIAS, AttentionCall
from shardwright.hlo import ArrayShape, Computation, Instruction
from shardwright.planner.attention.axes import Label, Labels, flat, reshape_labels, size_of, unpermuted
from shardwright.planner.attention.elementwise import ELEMENTWISE
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.operands import Operand
from shardwright.planner.attention.recognise import Attention, LeftAloneError, Result
from shardwright.planner.attention.tuning import HIDDEN
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import InstructionWriter, reduction_region


def call_of(attention: Attention) -> AttentionCall:
    """The forward call."""
    size = attention.size
    kv_heads = tuple(axis for axis in (*attention.heads, *attention.groups) if axis in attention.k.axes)
    types = {operand.element_type for operand in (attention.q, attention.k, attention.v)}
    training = len(attention.results) > sum(result.role == "out" for result in attention.results)
    return AttentionCall(
        backward=False,
        batch=size(attention.batch),
        heads=size((*attention.heads, *attention.groups)),
        kv_heads=size(kv_heads),
        rows=attention.sizes[attention.rows],
        keys=attention.sizes[attention.keys],
        width=size(attention.width),
        value_width=size(attention.value_width),
        element_type=types.pop() if len(types) == 1 else "f32",
        rows_first=_is_rows_first(attention),
        scale=attention.scale,
        mask=attention.mask.kind,
        window=attention.mask.window,
        bias=_bias_dims(attention) if attention.mask.is_biased else (),
        statistics=training,
    )


def _is_rows_first(attention: Attention) -> bool:
    order = attention.q.axes
    heads = [axis for axis in (*attention.heads, *attention.groups) if axis in order]
    return all(order.index(attention.rows) < order.index(axis) for axis in heads)


def _bias_axes(attention: Attention) -> tuple[Label, Label, Label, Label]:
    """Axes of the bias' dimensions: batch and heads where it differs along them, rows, keys."""
    heads = (*attention.heads, *attention.groups)
    has_gradient = any(result.role == "dbias" for result in attention.results)
    batch_varies, heads_vary = (not set(axes).isdisjoint(attention.varying) for axes in (attention.batch, heads))
    return (
        attention.batch if batch_varies else (),
        heads if heads_vary or has_gradient else (),
        (attention.rows,),
        (attention.keys,),
    )


def _bias_dims(attention: Attention) -> tuple[int, ...]:
    return tuple(attention.size(axes) for axes in _bias_axes(attention))


def arranged(
    writer: InstructionWriter, value: Instruction, labels: Labels, target: Labels, sizes: Mapping[str, int]
) -> Instruction:
    """A value whose dimensions run over the axes of `target`."""
    order, wanted = flat(labels), flat(target)
    if order != wanted:
        value = reshaped(writer, value, tuple(sizes[axis] for axis in order))
        places = [order.index(axis) for axis in wanted]
        dims = tuple(sizes[axis] for axis in wanted)
        mapped = f"{{{','.join(map(str, places))}}}"
        value = writer.array("transpose", value.shape.leaves[0].element_type, dims, value, dimensions=mapped)
    return reshaped(writer, value, tuple(size_of(label or (), sizes) for label in target))


def reshaped(writer: InstructionWriter, value: Instruction, dims: tuple[int, ...]) -> Instruction:
    leaf = value.shape.leaves[0]
    return value if leaf.dimensions == dims else writer.array("reshape", leaf.element_type, dims, value)


def converted(writer: InstructionWriter, value: Instruction, element_type: str) -> Instruction:
    leaf = value.shape.leaves[0]
    return value if leaf.element_type == element_type else writer.array("convert", element_type, leaf.dimensions, value)


class AttentionWriter:
    """Writes one attention.

    replaced: values of the program by what stands for them now. calls: forward, backward.
    regions: of reductions, by name; new ones are added.
    """

    def __init__(
        self,
        attention: Attention,
        call: AttentionCall,
        names: edit.Names,
        flow: Flow,
        regions: dict[str, Computation],
    ) -> None:
        self._attention, self._call, self._flow = attention, call, flow
        self._writer = InstructionWriter(attention.cone.product, names)
        self._bias: dict[tuple[Instruction, Labels], Instruction] = {}
        self.replaced: dict[Instruction, Instruction] = {}
        self._regions = regions
        self.calls: list[Instruction] = []

    @property
    def written(self) -> list[Instruction]:
        return self._writer.written

    def write(self) -> None:
        attention, call = self._attention, self._call
        heads = (*attention.heads, *attention.groups)
        q = self._operand(attention.q, (attention.rows,), heads, attention.width)
        k = self._operand(attention.k, (attention.keys,), heads, attention.width)
        v = self._operand(attention.v, (attention.keys,), heads, attention.value_width)
        bias, hidden = self._write_bias() if call.bias else ([], None)
        forward = self._write_call(call, [q, k, v, *bias])
        out = self._writer.element(forward, 0)
        self._restore("out", self._with_hidden_rows(out, hidden))
        if not call.statistics:
            return
        assert attention.dout is not None
        dout = self._operand(attention.dout, (attention.rows,), heads, attention.value_width)
        seen = self._seen_gradient(dout, hidden)
        has_bias_gradient = any(result.role == "dbias" for result in attention.results)
        backward = replace(call, backward=True, statistics=True, bias_gradient=has_bias_gradient)
        statistics = self._writer.element(forward, 1)
        results = self._write_call(backward, [q, k, v, statistics, seen, *bias, self._turned(out)])
        for place, role in enumerate(backward.results[:-1]):
            if any(result.role == role for result in attention.results):
                value = self._writer.element(results, place)
                if role == "dv" and seen is not dout and hidden is not None:
                    value = self._with_even_rows(value, dout, hidden)
                self._restore(role, value)

    def _write_call(self, call: AttentionCall, operands: Sequence[Instruction]) -> Instruction:
        instruction = self._writer.instruction("custom-call", call.result_shape, *operands, **call.attribute_texts())
        self.calls.append(instruction)
        return instruction

    def _turned(self, out: Instruction) -> Instruction:
        """The output as the backward call reads it."""
        if not self._call.rows_first:
            return out
        dims = out.shape.leaves[0].dimensions
        turned = (dims[0], dims[2], dims[1], dims[3])
        return self._writer.array("transpose", self._call.element_type, turned, out, dimensions="{0,2,1,3}")

    def _operand(self, operand: Operand, rows: Label, heads: Label, width: Label) -> Instruction:
        """An operand in the call's dimensions and type."""
        present = tuple(axis for axis in heads if axis in operand.axes)
        dims = (self._attention.batch, rows, present, width) if self._call.rows_first else (
            self._attention.batch, present, rows, width
        )  # fmt: skip
        if set(flat(dims)) != set(operand.axes):
            raise LeftAloneError("an operand has axes of its own")
        value = operand.value
        if operand.element_type != self._call.element_type:
            value = self._converted(value, self._call.element_type)
        return self._arranged(value, operand.labels, dims)

    def _converted(self, value: Instruction, element_type: str) -> Instruction:
        return converted(self._writer, value, element_type)

    def _arranged(self, value: Instruction, labels: Labels, target: Labels) -> Instruction:
        return arranged(self._writer, value, labels, target, self._attention.sizes)

    def _reshaped(self, value: Instruction, dims: tuple[int, ...]) -> Instruction:
        return reshaped(self._writer, value, dims)

    def _restore(self, role: str, value: Instruction) -> None:
        """Put one result of a call in the place of the program's values."""
        attention = self._attention
        heads = (*attention.heads, *attention.groups)
        kv_heads = tuple(axis for axis in heads if axis in attention.k.axes)
        batch, rows, keys = attention.batch, (attention.rows,), (attention.keys,)
        labels: Labels = {
            "out": (batch, heads, rows, attention.value_width),
            "dq": (batch, heads, rows, attention.width),
            "dk": (batch, kv_heads, keys, attention.width),
            "dv": (batch, kv_heads, keys, attention.value_width),
            "dbias": ((), heads, rows, keys),
        }[role]
        for result in attention.results:
            if result.role == role:
                self.replaced[result.instead_of] = self._result(value, labels, result)

    def _result(self, value: Instruction, labels: Labels, result: Result) -> Instruction:
        leaf = result.instead_of.shape.leaves[0]
        if set(flat(labels)) != set(flat(result.labels)):
            raise LeftAloneError("a result has axes of its own")
        value = self._arranged(value, labels, result.labels)
        if abs(result.factor - 1) > 1e-6:
            value = self._converted(value, "f32")
            factor = self._writer.spread(self._writer.constant("f32", result.factor), leaf.dimensions, ())
            value = self._writer.elementwise("multiply", value, factor)
        return self._converted(value, leaf.element_type)

    # ---- the bias ----------------------------------------------------------

    def _write_bias(self) -> tuple[list[Instruction], Instruction | None]:
        """The logits where all scores are 0, in the call's type, and which rows see no key, where that needs care."""
        attention = self._attention
        target = _bias_axes(attention)
        bias_axes = frozenset(flat(target))
        labels = attention.cone.labels[attention.logits]
        here = tuple(tuple(axis for axis in label or () if axis in bias_axes) for label in labels)
        logits = self._arranged(self._logits(attention.logits, labels, bias_axes), here, target)
        lowest = self._filled(HIDDEN_BIAS[self._call.element_type], logits)
        bias = self._writer.elementwise("maximum", logits, lowest)
        if attention.hidden == "even":  # scores count for nothing there: a number that they do not change
            leaf = logits.shape.leaves[0]
            where = self._is_hidden(logits)
            bias = self._writer.array("select", leaf.element_type, leaf.dimensions, where, lowest, bias)
        cares = attention.hidden in ("zero", "nan") or attention.hidden_gradient == "zero"
        return [self._converted(bias, self._call.element_type)], self._hidden_rows(logits) if cares else None

    # ---- rows that see no key ----------------------------------------------

    def _filled(self, number: float, like: Instruction) -> Instruction:
        leaf = like.shape.leaves[0]
        return self._writer.spread(self._writer.constant(leaf.element_type, number), leaf.dimensions, ())

    def _is_hidden(self, logits: Instruction) -> Instruction:
        dims = logits.shape.leaves[0].dimensions
        return self._writer.array("compare", "pred", dims, logits, self._filled(HIDDEN, logits), direction="LE")

    def _hidden_rows(self, logits: Instruction) -> Instruction:
        """Whether a row sees no key: [1 or batch, 1 or heads, rows]."""
        leaf = logits.shape.leaves[0]
        lowest = self._writer.constant(leaf.element_type, float("-inf"))
        return self._is_hidden(self._reduced("maximum", logits, 3, lowest))

    def _reduced(self, opcode: str, value: Instruction, dim: int, initial: Instruction) -> Instruction:
        leaf = value.shape.leaves[0]
        name = f"attention.{opcode}.{leaf.element_type}"
        region = self._regions.setdefault(name, reduction_region(name, opcode, leaf.element_type))
        dims = leaf.dimensions[:dim] + leaf.dimensions[dim + 1 :]
        return self._writer.reduce(ArrayShape(leaf.element_type, dims), region, [dim], value, initial)

    def _hidden_like(self, hidden: Instruction, dims: tuple[int, ...], rows_first: bool) -> Instruction:
        """Which rows see no key, over the dimensions of an array of rows."""
        order = (0, 2, 1) if rows_first else (0, 1, 2)
        sizes = hidden.shape.leaves[0].dimensions
        full = (self._call.batch, self._call.heads, self._call.rows)
        along = [dim for dim in range(3) if sizes[dim] == full[dim]]
        value = self._reshaped(hidden, tuple(sizes[dim] for dim in along))
        return self._writer.spread(value, dims, [order[dim] for dim in along])

    def _with_hidden_rows(self, out: Instruction, hidden: Instruction | None) -> Instruction:
        """The output with what the program has in rows that see no key."""
        number = {"zero": 0.0, "nan": float("nan")}.get(self._attention.hidden)
        if hidden is None or number is None:
            return out
        where = self._hidden_like(hidden, out.shape.leaves[0].dimensions, rows_first=False)
        filled = self._filled(number, out)
        return self._writer.array("select", self._call.element_type, out.shape.leaves[0].dimensions, where, filled, out)

    def _seen_gradient(self, dout: Instruction, hidden: Instruction | None) -> Instruction:
        """The output's gradient, 0 in rows whose scores have none."""
        if hidden is None or self._attention.hidden_gradient != "zero":
            return dout
        dims = dout.shape.leaves[0].dimensions
        where = self._hidden_like(hidden, dims, self._call.rows_first)
        return self._writer.array("select", self._call.element_type, dims, where, self._filled(0.0, dout), dout)

    def _with_even_rows(self, dv: Instruction, dout: Instruction, hidden: Instruction) -> Instruction:
        """The gradient of v with rows that weigh all keys alike, whose scores have none."""
        call = self._call
        if self._attention.hidden != "even":
            return dv
        dout = self._converted(dout, "f32")
        dims = dout.shape.leaves[0].dimensions
        where = self._hidden_like(hidden, dims, call.rows_first)
        part = self._writer.array("select", "f32", dims, where, dout, self._filled(0.0, dout))
        zero = self._writer.constant("f32", 0.0)
        total = self._reduced("add", part, 1 if call.rows_first else 2, zero)
        shared = self._reshaped(total, (call.batch, call.kv_heads, call.heads // call.kv_heads, call.value_width))
        total = self._reduced("add", shared, 2, zero)
        mean = self._writer.elementwise("multiply", total, self._filled(1 / call.keys, total))
        wide = self._converted(dv, "f32")
        spread = self._writer.spread(mean, dv.shape.leaves[0].dimensions, (0, 1, 3))
        return self._converted(self._writer.elementwise("add", wide, spread), call.element_type)

    # ---- logits --------------------------------------------------------------

    def _logits(self, value: Instruction, labels: Labels, bias_axes: frozenset[str]) -> Instruction:
        value = self._flow.source(value)
        key = (value, labels)
        if key not in self._bias:
            self._bias[key] = self._copy(value, labels, bias_axes)
        return self._bias[key]

    def _copy(self, value: Instruction, labels: Labels, bias_axes: frozenset[str]) -> Instruction:
        """A value of the logits' at one coordinate of the axes that the bias does not have."""
        attention, opcode = self._attention, value.opcode
        is_whole = value not in attention.cone.labels and bias_axes.issuperset(flat(labels))
        if is_whole and not (opcode == "broadcast" and None in labels):
            return value
        element_type = value.shape.leaves[0].element_type
        dims = tuple(
            size_of(tuple(axis for axis in label or () if axis in bias_axes), attention.sizes) for label in labels
        )
        if value is attention.cone.product:
            return self._writer.spread(self._writer.constant(element_type, 0.0), dims, ())
        sources = [self._flow.source(operand) for operand in value.operands]
        if opcode in ELEMENTWISE:
            operands = [
                self._logits(each, labels, bias_axes) if each.shape.leaves[0].rank else each for each in sources
            ]
            return self._same(value, element_type, dims, operands)
        if opcode == "broadcast":
            along = value.get("dimensions", ())
            inner = self._logits(sources[0], tuple(labels[dim] for dim in along), bias_axes)
            return self._writer.spread(inner, dims, along)
        if opcode == "transpose":
            inner = self._logits(sources[0], unpermuted(labels, value.get("dimensions")), bias_axes)
            return self._same(value, element_type, dims, [inner])
        if opcode == "reshape":
            shapes = [each.shape.leaves[0].dimensions for each in (value, sources[0])]
            inner_labels = reshape_labels(labels, shapes[0], shapes[1], attention.sizes)
            return self._reshaped(self._logits(sources[0], inner_labels, bias_axes), dims)
        ranges = ", ".join(f"[0:{size}]" for size in dims)
        whole = value.shape.leaves[0].dimensions
        if any(size not in (1, full) for size, full in zip(dims, whole, strict=True)):
            raise LeftAloneError("its mask merges axes")
        return self._writer.array("slice", element_type, dims, value, slice=f"{{{ranges}}}")

    def _same(
        self, value: Instruction, element_type: str, dims: tuple[int, ...], operands: Sequence[Instruction]
    ) -> Instruction:
        """The operation of `value` on other operands."""
        copy = self._writer.array(value.opcode, element_type, dims, *operands)
        copy.attributes |= {
            name: each for name, each in value.attributes.items() if name not in ("metadata", "sharding")
        }
        return copy
