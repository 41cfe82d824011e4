"""HLO element types ↔ numpy dtypes (ml_dtypes when numpy lacks one)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from shardwright.errors import UnsupportedProgramError

_NUMPY_NAMES: dict[str, str] = {
    "pred": "bool",
    "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "f16": "float16", "f32": "float32", "f64": "float64",
    "c64": "complex64", "c128": "complex128",
}  # fmt: skip

_ML_NAMES: dict[str, str] = {
    "bf16": "bfloat16",
    "s2": "int2", "s4": "int4", "u2": "uint2", "u4": "uint4",
    "f4e2m1fn": "float4_e2m1fn",
    "f8e3m4": "float8_e3m4", "f8e4m3": "float8_e4m3", "f8e4m3b11fnuz": "float8_e4m3b11fnuz",
    "f8e4m3fn": "float8_e4m3fn", "f8e4m3fnuz": "float8_e4m3fnuz", "f8e5m2": "float8_e5m2",
    "f8e5m2fnuz": "float8_e5m2fnuz", "f8e8m0fnu": "float8_e8m0fnu",
}  # fmt: skip

_DTYPES: dict[str, np.dtype] = {
    **{element: np.dtype(name) for element, name in _NUMPY_NAMES.items()},
    **{element: np.dtype(getattr(ml_dtypes, name)) for element, name in _ML_NAMES.items()},
}
_ELEMENT_TYPES: dict[np.dtype, str] = {dtype: element for element, dtype in _DTYPES.items()}


def to_dtype(element_type: str) -> np.dtype:
    """The numpy dtype of an HLO element type; UnsupportedProgramError if none exists."""
    try:
        return _DTYPES[element_type]
    except KeyError:
        raise UnsupportedProgramError(f"element type {element_type!r} has no numpy dtype") from None


def to_element_type(dtype: object) -> str:
    """HLO's name of a numpy dtype; UnsupportedProgramError if XLA has none."""
    try:
        return _ELEMENT_TYPES[np.dtype(dtype)]  # type: ignore[call-overload]
    except KeyError:
        raise UnsupportedProgramError(f"dtype {dtype} has no HLO element type") from None
