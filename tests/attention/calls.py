"""Attention calls as programs of their own."""

from __future__ import annotations

from shardwright.attention import AttentionCall
from shardwright.hlo import ArrayShape


def program_of(call: AttentionCall) -> str:
    """HLO text of a program that is the call: its operands are arguments, all but the workspace are outputs."""
    shapes = call.operand_shapes
    lines = [
        f"  {role} = {_text(shape)} parameter({n})"
        for n, (role, shape) in enumerate(zip(call.operands, shapes, strict=True))
    ]
    results = call.result_shape.leaves
    attributes = ", ".join(f"{name}={value}" for name, value in call.attribute_texts().items())
    lines.append(f"  attend = ({', '.join(map(_text, results))}) custom-call({', '.join(call.operands)}), {attributes}")
    outputs = [f"{role}.out" for role in call.results[:-1]]
    lines += [
        f"  {name} = {_text(shape)} get-tuple-element(attend), index={n}"
        for n, (name, shape) in enumerate(zip(outputs, results, strict=False))
    ]
    lines.append(f"  ROOT all = ({', '.join(map(_text, results[:-1]))}) tuple({', '.join(outputs)})")
    return "HloModule attention\n\nENTRY main {\n" + "\n".join(lines) + "\n}\n"


def _text(shape: ArrayShape) -> str:
    return f"{shape.element_type}[{','.join(map(str, shape.dimensions))}]{{{shape.layout}}}"
