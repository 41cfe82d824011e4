"""Python objects as bytes, without pickle: nothing that is read can run code.

A message is a JSON head and `.npy` records behind it. The head keeps what JSON alone would lose: a value that is not
text, a finite number, a bool, None or a list is an object of one key, its kind: `{"tuple": […]}`,
`{"dict": [[key, value], …]}`, `{"array": index}`. Kinds of the standard library and of classes are in
`object_classes.py`.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import sys
import tokenize
from collections.abc import Callable
from typing import Any

import numpy as np

from shardwright import object_classes
from shardwright.errors import CollectiveError, ObjectTypeError

_LENGTH = struct.Struct("<Q")
_MAX_DEPTH = 200
_REMEDY = (
    "send numbers, text, bytes, None, arrays, dates, paths, enums, data classes, and lists, tuples, sets and dicts of "
    "them"
)


# ---- writing ---------------------------------------------------------------------
def dumps(obj: Any, where: str = "object") -> bytes:
    """The message of an object. where: its name in errors.

    Raises ObjectTypeError, naming the path of what cannot be sent.
    """
    arrays: list[bytes] = []
    head = json.dumps(_encode(obj, where, arrays, 0), allow_nan=False, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *arrays])


def _encode(value: Any, path: str, arrays: list[bytes], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ObjectTypeError(
            f"nested deeper than {_MAX_DEPTH}, or within itself", where=path, remedy="send a flat object"
        )
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if _is_unicode(value) else {"utf16": base64.b64encode(_utf16(value)).decode()}
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value, path, arrays, depth + 1)
    if isinstance(value, np.generic):
        return {"scalar": _store(np.asarray(value), path, arrays)}
    if isinstance(value, np.ndarray) or _is_jax_array(value):
        return {"array": _store(_as_numpy(value, path), path, arrays)}
    if _is_torch_tensor(value):
        return {"torch": _store(_torch_as_numpy(value, path), path, arrays)}
    parts = object_classes.take_apart(value)
    if parts is not None:
        return {parts[0]: _encode(parts[1], path, arrays, depth + 1)}
    raise ObjectTypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent", where=path, remedy=_REMEDY)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-le", "surrogatepass")


def _items(value: Any, path: str, arrays: list[bytes], depth: int) -> list[Any]:
    return [_encode(item, f"{path}[{index}]", arrays, depth) for index, item in enumerate(value)]


def _write_dict(value: dict[Any, Any], path: str, arrays: list[bytes], depth: int) -> Any:
    return {
        "dict": [
            [_encode(key, f"{path} key {key!r}", arrays, depth), _encode(item, f"{path}[{key!r}]", arrays, depth)]
            for key, item in value.items()
        ]
    }


_WRITERS: dict[type, Callable[[Any, str, list[bytes], int], Any]] = {
    list: _items,
    tuple: lambda value, path, arrays, depth: {"tuple": _items(value, path, arrays, depth)},
    set: lambda value, path, arrays, depth: {"set": _items(value, path, arrays, depth)},
    frozenset: lambda value, path, arrays, depth: {"frozenset": _items(value, path, arrays, depth)},
    dict: _write_dict,
    bytes: lambda value, *_: {"bytes": base64.b64encode(value).decode()},
    complex: lambda value, *_: {"complex": [value.real.hex(), value.imag.hex()]},
}


def _is_jax_array(value: Any) -> bool:
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def _is_torch_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _torch_as_numpy(tensor: Any, path: str) -> np.ndarray:
    import ml_dtypes
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ObjectTypeError("a tensor that is not dense cannot be sent", where=path, remedy="call to_dense() first")
    local = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if local.dtype is torch.bfloat16:
        return np.asarray(local.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    try:
        return np.asarray(local.numpy())
    except TypeError as error:  # a type that numpy does not have
        raise ObjectTypeError(f"this tensor cannot be read: {error}", where=path, remedy=_REMEDY) from None


def _as_torch(array: np.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_numpy(value: Any, path: str) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray):
        raise ObjectTypeError("a masked array would lose its mask", where=path, remedy="send .data and .mask")
    try:
        return np.asarray(value)
    except (TypeError, RuntimeError) as error:  # a random key, an array of several ranks, a traced value
        raise ObjectTypeError(f"this array cannot be read: {error}", where=path, remedy=_REMEDY) from None


def _store(array: np.ndarray, path: str, arrays: list[bytes]) -> list[Any]:
    """Write an array behind the head; its place, and the name of a type that `.npy` does not know."""
    if array.dtype.hasobject:
        raise ObjectTypeError("an array of Python objects cannot be sent", where=path, remedy=_REMEDY)
    name = ""
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.name != array.dtype.str[1:]:
        name, array = _extension_name(array.dtype, path), array.view(f"u{array.dtype.itemsize}")
    buffer = io.BytesIO()
    try:
        np.lib.format.write_array(buffer, array, allow_pickle=False)
    except ValueError as error:
        raise ObjectTypeError(f"this array cannot be written: {error}", where=path, remedy=_REMEDY) from None
    arrays.append(buffer.getvalue())
    return [len(arrays) - 1, name]


def _extension_name(dtype: np.dtype, path: str) -> str:
    if _extension_type(dtype.name) != dtype:
        raise ObjectTypeError(f"an array of {dtype} cannot be sent", where=path, remedy="cast or view it first")
    return dtype.name


def _extension_type(name: str) -> np.dtype | None:
    import ml_dtypes

    found = getattr(ml_dtypes, name, None)
    return np.dtype(found) if isinstance(found, type) and issubclass(found, np.generic) else None


# ---- reading ---------------------------------------------------------------------
#: What readers of JSON, `.npy` heads and types raise for bytes that nobody wrote.
_MALFORMED = (
    ValueError, LookupError, TypeError, AttributeError, SyntaxError, ArithmeticError, EOFError, RecursionError,
    MemoryError, struct.error, tokenize.TokenError,
)  # fmt: skip


def loads(raw: bytes) -> Any:
    """The object of a message. Raises CollectiveError for bytes that `dumps` cannot have written."""
    try:
        (length,) = _LENGTH.unpack_from(raw)
        start = _LENGTH.size + length
        head = json.loads(raw[_LENGTH.size : start].decode())
        buffer = io.BytesIO(raw)
        buffer.seek(start)
        arrays = []
        while buffer.tell() < len(raw):
            arrays.append(np.lib.format.read_array(buffer, allow_pickle=False))
        return _decode(head, arrays)
    except _MALFORMED as error:
        raise CollectiveError(
            f"a message that is no object: {error}", where="objects", remedy="run the same version at all ranks"
        ) from None


def _decode(data: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(data, list):
        return [_decode(item, arrays) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind in ("array", "scalar", "torch"):
        index, name = content
        array = arrays[index]
        if name:
            dtype = _extension_type(name)
            if dtype is None:
                raise ValueError(f"no type {name!r}")
            array = array.view(dtype)
        if kind == "torch":
            return _as_torch(array)
        return array if kind == "array" else array[()]
    if kind in object_classes.KINDS:
        return object_classes.put_together(kind, _decode(content, arrays))
    return _READERS[kind](content, arrays)


_READERS: dict[str, Callable[[Any, list[np.ndarray]], Any]] = {
    "tuple": lambda content, arrays: tuple(_decode(content, arrays)),
    "set": lambda content, arrays: set(_decode(content, arrays)),
    "frozenset": lambda content, arrays: frozenset(_decode(content, arrays)),
    "dict": lambda content, arrays: {_decode(key, arrays): _decode(item, arrays) for key, item in content},
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
    "int": lambda content, _: int(content, 16),
    "float": lambda content, _: float.fromhex(content),
    "complex": lambda content, _: complex(float.fromhex(content[0]), float.fromhex(content[1])),
    "utf16": lambda content, _: base64.b64decode(content, validate=True).decode("utf-16-le", "surrogatepass"),
}
