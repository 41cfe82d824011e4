"""Memories of arguments and results for compilers without devices.

PJRT's clients turn `mhlo.memory_kind` of a program's arguments and results into layouts before they compile; a compiler
for described devices (`private_devices`) does not. It takes layouts in the compile options instead, of whole arrays.
jaxlib's `Shape` has no memory space to set: it is added to the serialized message, where a second `layout` is merged
into the first (protocol buffers: "Last One Wins" and merged submessages).

    CompileOptionsProto        argument_layouts = 1 (ShapeProto, repeated), executable_build_options = 3
    ExecutableBuildOptionsProto    result_layout = 2 (ShapeProto)
    ShapeProto                 element_type = 2, tuple_shapes = 4 (repeated), layout = 5
    LayoutProto                memory_space = 8

(xla/pjrt/proto/compile_options.proto, xla/xla_data.proto; `tests/xla/test_host_layouts.py` reads them back.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.dtypes import to_dtype
from shardwright.plans.plan import Plan, VariablePlan
from shardwright.xla import private

_ARGUMENT_LAYOUTS, _BUILD_OPTIONS, _RESULT_LAYOUT = 1, 3, 2
_ELEMENT_TYPE, _TUPLE_SHAPES, _LAYOUT, _MEMORY_SPACE = 2, 4, 5, 8

#: XLA's number of the host's memory (Layout::kHostMemorySpace), and of a tuple among the element types.
_HOST, _TUPLE = 5, 13


def set_host_layouts(options: Any, plan: Plan) -> Any:
    """Compile options with the memory of every argument and result of the plan; the same where none is on the host."""
    if not any(variable.is_on_host for variable in (*plan.parameters, *plan.outputs)):
        return options
    results = _shapes(plan.outputs)
    result = results[0] if len(results) == 1 else _number(_ELEMENT_TYPE, _TUPLE) + _repeated(_TUPLE_SHAPES, results)
    added = _repeated(_ARGUMENT_LAYOUTS, _shapes(plan.parameters))
    added += _message(_BUILD_OPTIONS, _message(_RESULT_LAYOUT, result))
    return type(options).ParseFromString(options.SerializeAsString() + added)


def _shapes(variables: Sequence[VariablePlan]) -> list[bytes]:
    there = _message(_LAYOUT, _number(_MEMORY_SPACE, _HOST))
    return [
        private.serialized_shape(to_dtype(variable.element_type), variable.stored_shape)
        + (there if variable.is_on_host else b"")
        for variable in variables
    ]


def _repeated(field: int, messages: Sequence[bytes]) -> bytes:
    return b"".join(_message(field, message) for message in messages)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    low, value = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(value) if value else bytes([low])
