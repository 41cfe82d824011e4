"""Objects as messages: what comes out is what went in, type by type, and nothing that arrives runs code."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from shardwright.errors import CollectiveError, ObjectTypeError
from shardwright.object_codec import dumps, loads

_DTYPES = st.one_of(
    stn.boolean_dtypes(), stn.integer_dtypes(), stn.floating_dtypes(), stn.complex_number_dtypes(),
    stn.byte_string_dtypes(), stn.unicode_string_dtypes(), stn.datetime64_dtypes(),
    st.sampled_from([np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)]),
)  # fmt: skip
_ARRAYS = st.one_of(
    stn.arrays(_DTYPES.filter(lambda dtype: dtype.kind != "V"), stn.array_shapes(min_dims=0, min_side=0, max_side=3)),
    st.lists(st.floats(-1, 1), max_size=4).map(lambda values: np.array(values, ml_dtypes.bfloat16)),
)
_KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20), st.complex_numbers()
)
_HASHABLE = st.recursive(_KEYS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
OBJECTS = st.recursive(
    st.one_of(_KEYS, _ARRAYS, _ARRAYS.filter(lambda array: array.ndim == 0).map(lambda array: array[()])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(_HASHABLE, inner, max_size=4),
        st.sets(_HASHABLE, max_size=3),
    ),
    max_leaves=12,
)  # fmt: skip


def form(value: Any) -> Any:
    """A value as something that compares by types and bits."""
    if isinstance(value, np.ndarray | np.generic):
        return type(value), np.asarray(value).dtype, np.shape(value), np.asarray(value).tobytes()
    if isinstance(value, list | tuple):
        return type(value), [form(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(form, value)))
    if isinstance(value, dict):
        return dict, [(form(key), form(item)) for key, item in value.items()]
    return type(value), repr(value)


def test_objects_arrive_as_they_were(request: pytest.FixtureRequest) -> None:
    @settings(
        max_examples=request.config.getoption("--fuzz-objects"), deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(OBJECTS)
    def check(value: Any) -> None:
        assert form(loads(dumps(value))) == form(value)

    check()


def test_bytes_that_are_no_object_are_an_error(request: pytest.FixtureRequest) -> None:
    @settings(max_examples=request.config.getoption("--fuzz-objects"), deadline=None, database=None)
    @given(st.one_of(st.binary(max_size=60), st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=8))))
    def check(change: Any) -> None:
        raw = dumps({"a": [1, (2.5, np.arange(3))], 3: b"x"})
        if isinstance(change, tuple):
            start, patch = change
            raw = raw[:start] + patch + raw[start + len(patch) :]
        else:
            raw = change
        with contextlib.suppress(CollectiveError):
            loads(raw)

    check()


def test_arrays_of_jax_arrive_as_numpys() -> None:
    found = loads(dumps({"w": jnp.ones((2, 3), jnp.bfloat16)}))["w"]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.dtype(ml_dtypes.bfloat16)


def test_nothing_is_unpickled() -> None:
    with pytest.raises(CollectiveError):
        loads(pickle.dumps({"a": 1}))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "object"),
        ({"a": [1, {2}, len]}, "object['a'][2]"),
        ({"a": (0, np.array([None]))}, "object['a'][1]"),
        ([type("Text", (str,), {})("x")], "object[0]"),
        ({"m": np.ma.masked_array([1, 2], [True, False])}, "object['m']"),
        ({object: 1}, "object key"),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(ObjectTypeError) as caught:
        dumps(value)
    assert caught.value.where.startswith(path)
    assert isinstance(caught.value, TypeError)


def test_an_object_within_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ObjectTypeError, match="within itself"):
        dumps(loop)
