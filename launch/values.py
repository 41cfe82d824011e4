"""Arguments and results of functions in other processes: JSON and `.npy`, without executable code.

JSON alone loses types: tuples become lists, keys become texts. Such values are objects of one key:
`{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"bytes": base64}`, `{"array": base64 of .npy}`.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

from shardwright.errors import OptionError

_REMEDY = "pass numbers, texts, bytes, None, numpy arrays, and lists, tuples and dicts of them"


def encode(value: Any, where: str) -> str:
    """Encode a value to JSON. where: its name in errors. Raises OptionError for other types."""
    return json.dumps(_to_json(value, where))


def decode(text: str) -> Any:
    """Decode `encode`'s text to an equal value of the same types."""
    return _from_json(json.loads(text))


def _to_json(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if type(value) is dict:
        pairs = [[_to_json(key, where), _to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"dict": pairs}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return {"array": base64.b64encode(_encode_npy(value, where)).decode(), "type": str(value.dtype)}
    raise OptionError(f"a value of type {type(value).__name__} cannot be sent", where=where, remedy=_REMEDY)


def _encode_npy(value: Any, where: str) -> bytes:
    """The `.npy` of an array; types unknown to `.npy`, such as bfloat16, are stored as unsigned integers."""
    import numpy as np

    array = np.asarray(value)
    if array.dtype.hasobject:
        raise OptionError("an array of Python objects cannot be sent", where=where, remedy=_REMEDY)
    if array.dtype.kind == "V" and array.dtype.names is None:
        array = array.view(f"u{array.dtype.itemsize}")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _from_json(data: Any) -> Any:
    if isinstance(data, list):
        return [_from_json(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "tuple" in data:
        return tuple(_from_json(item) for item in data["tuple"])
    if "dict" in data:
        return {_from_json(key): _from_json(item) for key, item in data["dict"]}
    if "bytes" in data:
        return base64.b64decode(data["bytes"])
    return _decode_array(base64.b64decode(data["array"]), data["type"])


def _decode_array(npy: bytes, type_name: str) -> Any:
    import numpy as np

    array = np.load(io.BytesIO(npy), allow_pickle=False)
    if str(array.dtype) == type_name:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, type_name))
