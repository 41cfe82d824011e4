"""Arguments as `jax.jit` takes them: what is refused, by its path; which are static and which donated."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardwright as sw
from shardwright.client.frontends.jax import JaxFunction
from shardwright.client.frontends.program import Program

ROWS = np.arange(12.0, dtype=np.float32).reshape(3, 4)


class Foreign:
    """An array of another library, as numpy sees it."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return ROWS


class WithJaxArray:
    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(ROWS)


def deleted() -> jax.Array:
    array = jnp.asarray(ROWS) + 0
    array.delete()
    return array


def wide() -> jax.Array:
    with jax.enable_x64(True):
        return jnp.arange(3.0)


#: What a leaf is → (what is said of it, what to do).
REFUSED: dict[str, tuple[Any, str, str]] = {
    "str": ("adam", "a str", "static_argnames"),
    "bytes": (b"adam", "a bytes", "static_argnames"),
    "strings": (np.array(["a"]), "array of <U1", "integers"),
    "str_": (np.str_("a"), "numpy <U1", "integers"),
    "objects of one shape": (np.array([1, 2.5], object), "of objects", r"np\.asarray\(x\.tolist"),
    "ragged": (np.array([[1], [1, 2]], object), "of objects", "pad"),
    "objects": (np.array([object()]), "of objects", "pass numbers"),
    "big-endian": (np.ones(3, ">f4"), ">f4", r"newbyteorder\('='\)"),
    "date": (np.datetime64("2020-01-01"), r"datetime64\[D\]", "timedelta64"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), r"datetime64\[D\]", "timedelta64"),
    "duration": (np.timedelta64(1, "s"), r"timedelta64\[s\]", "timedelta64"),
    "records": (np.zeros(2, [("a", "f4")]), "records", r"x\[name\]"),
    "long double": (np.ones(2, np.longdouble), "float128|longdouble", r"astype\(np\.float32\)"),
    "masked": (np.ma.array([1.0], mask=[1]), "masked", r"filled"),
    "function": (jnp.tanh, "function", "static_argnames"),
    "class": (int, "function", "static_argnames"),
    "set": ({1, 2}, "a set", "list or a tuple"),
    "range": (range(3), "a range", "list or a tuple"),
    "iterator": (iter([ROWS]), "list_iterator", r"next\(x\)"),
    "large int": (2**40, "1099511627776", "jax_enable_x64"),
    "type": (jax.ShapeDtypeStruct((2,), np.float32), r"float32\[2\]", r"step\.lower"),
    "Ref": (jax.new_ref(jnp.ones(2)), "mutable array", r"ref\[\.\.\.\]"),
    "other library": (Foreign(), "another library", r"np\.asarray"),
    "__jax_array__": (WithJaxArray(), "__jax_array__", r"jnp\.asarray"),
    "object": (object(), "type object", "register_dataclass"),
    "wide": (wide(), "float64, while jax_enable_x64 is off", "jax_enable_x64"),
}


@pytest.mark.filterwarnings("ignore:Python iterable type")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_leaf_is_named_by_its_path_with_a_remedy(kind: str) -> None:
    leaf, what, remedy = REFUSED[kind]
    batch = {"x": ROWS, "meta": {"name": leaf}}
    with pytest.raises(sw.UnsupportedProgramError, match=what) as caught:
        JaxFunction(lambda state, batch: state).describe((1.0, batch), {})
    assert caught.value.where == "batch['meta']['name']"
    assert re.search(remedy, caught.value.remedy)
    assert str(caught.value).count("\n") == 1  # one sentence, one remedy


def test_a_deleted_array_is_named() -> None:
    with pytest.raises(sw.ArrayError, match=r"rest\[1\]\[0\]: .*deleted"):
        JaxFunction(lambda *rest: rest).describe((1.0, [deleted()]), {})


def test_a_refused_result_is_named_by_its_path() -> None:
    for result, path in (({"name": "a"}, r"result\['name'\]"), ((1, jnp.tanh), r"result\[1\]"), (b"a", "result")):
        with pytest.raises(sw.UnsupportedProgramError, match=rf"^{path}: .*is no result"):
            sw.lower(lambda x, result=result: result, 1.0)


def test_a_whole_argument_is_named_for_static_argnames() -> None:
    with pytest.raises(sw.UnsupportedProgramError, match=r"static_argnames='mode'"):
        sw.lower(lambda x, mode: x, 1.0, "train")


def test_dicts_that_have_no_order_are_refused() -> None:
    with pytest.raises(sw.UnsupportedProgramError, match="dict keys of one type"):
        sw.lower(lambda x: x, {1: 1.0, "a": 2.0})


# ---- what cannot be traced, in words ------------------------------------------------


def test_errors_of_jax_that_have_another_remedy_here() -> None:
    from jax.experimental import checkify

    with pytest.raises(sw.UnsupportedProgramError, match=r"axis of jax\.pmap.*batch"):
        sw.lower(lambda x: jax.lax.pmean(x, "batch"), ROWS)
    with pytest.raises(sw.UnsupportedProgramError, match=r"parallelize checkify\.checkify"):
        sw.lower(lambda x: (checkify.check(x.sum() > 0, "no"), x)[1], ROWS)
    with pytest.raises(NameError, match="undefined_name"):  # the user's own comes through
        sw.lower(lambda x: undefined_name, ROWS)  # noqa: F821


def test_a_mutable_array_that_is_closed_over_is_refused() -> None:
    ref = jax.new_ref(jnp.ones(2))

    def step(x):
        ref[...] = x
        return x

    with pytest.raises(sw.UnsupportedProgramError, match="closes over a mutable array"):
        sw.lower(step, np.ones(2, np.float32))


def test_a_mutable_array_inside_is_none_of_ours() -> None:
    def step(x):
        ref = jax.new_ref(x)
        ref[0] = x[1]
        return ref[...]

    assert "f32[3,4]" in sw.lower(step, ROWS).hlo_text


# ---- static and donated arguments ----------------------------------------------------


def step(x, scale=2.0, mode="up", *, power=1, name="n"):
    y = x * scale if mode == "up" else x / scale
    return y**power if name == "n" else -y


def donated(program: Program) -> set[str]:
    return {program.argument_names[number] for number in program.aliases.values()}


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnames": ("mode", "power", "name")},
        {"static_argnames": ["power", "name"], "static_argnums": 2},
        {"static_argnames": ["power", "name"], "static_argnums": (-1,)},
    ],
    ids=["names", "names and numbers", "negative"],
)
@pytest.mark.parametrize("is_by_name", [False, True])
def test_static_arguments_by_name(options: dict[str, Any], is_by_name: bool) -> None:
    args, kwargs = ((ROWS, 2.0, "down"), {}) if not is_by_name else ((ROWS,), {"mode": "down"})
    program = sw.lower(step, *args, power=3, name="m", donate_argnames="x", **kwargs, **options)
    expected = jax.jit(step, static_argnames=("mode", "power", "name")).lower(*args, power=3, name="m", **kwargs)
    for word in ("divide", "negate"):
        assert (word in program.hlo_text) == (word in expected.as_text())
    assert donated(program) == {"x"}
    assert program.argument_names == ("x", "scale")[: 1 if is_by_name else 2]


def test_donated_keywords() -> None:
    def update(batch, *, params, state=None):
        return params + batch, state

    program = sw.lower(update, 1.0, params=ROWS, state=ROWS, donate_argnames=["params", "state"])
    assert donated(program) == {"params", "state"}
    program = sw.lower(
        lambda batch, *, params, state: state * batch, 1.0, params=[ROWS, ROWS], state=ROWS, donate_argnames="state"
    )
    assert program.donated == {3}
    assert program.argument_names[3] == "state"


def test_donated_keywords_stand_after_constants() -> None:
    table = jnp.ones(300)
    program = sw.lower(lambda x, *, state: state + table.sum() * x, 1.0, state=ROWS, donate_argnames="state")
    assert [program.argument_names[number] for number in program.donated] == ["state"]
    assert list(program.constants) == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_argnames": "modes"}, "no parameter 'modes'"),
        ({"donate_argnames": ["x", "y"]}, "no parameter 'y'"),
        ({"static_argnames": [1]}, "not argument names"),
        ({"donate_argnums": 7}, "7 names none"),
        ({"donate_argnums": -4}, "-4 names none"),
        ({"donate_argnames": "x", "static_argnums": 0}, "argument x of step is both"),
        ({"donate_argnums": 0, "static_argnames": "x"}, "argument x of step is both"),
    ],
)
def test_wrong_numbers_and_names_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sw.OptionError, match=message):
        JaxFunction(step, **options)


class Trainer:
    @functools.partial(jax.jit, static_argnums=(0, 2), donate_argnames="x")
    def step(self, x, mode):
        return x + 1 if mode == "up" else x - 1

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def __call__(self, x):
        return x * 2


jitted = jax.jit(step, static_argnames=("mode", "power", "name"), donate_argnums=0)


@pytest.mark.parametrize(
    ("fn", "args", "names"),
    [
        (jitted, (ROWS, 2.0, "down"), ("x", "scale")),
        (functools.partial(jitted, scale=3.0), (ROWS,), ("x",)),
        (Trainer().step, (ROWS, "down"), ("x",)),
        (functools.partial(Trainer().step, mode="up"), (ROWS,), ("x",)),
        (Trainer(), (ROWS,), ("x",)),
        (nnx.jit(step, static_argnames="mode", donate_argnames="x"), (ROWS, 2.0, "down"), ("x", "scale")),
    ],
    ids=["jit", "partial", "method", "partial of a method", "callable object", "nnx.jit"],
)
def test_a_jit_keeps_its_static_and_donated_arguments(fn: Any, args: tuple[Any, ...], names: tuple[str, ...]) -> None:
    program = sw.lower(fn, *args)
    assert program.argument_names == names
    assert donated(program) == {"x"}


def test_what_is_given_besides_a_jits_own() -> None:
    program = sw.lower(jitted, ROWS, ROWS, mode="up", donate_argnames="scale")
    assert donated(program) == {"scale"}  # instead
    assert donated(sw.lower(jitted, ROWS, donate_argnums=())) == set()
    with pytest.raises(sw.OptionError, match="argument mode of step is both"):
        JaxFunction(jitted, donate_argnames="mode")
    assert sw.lower(jitted, ROWS, 2.0, static_argnums=1).argument_names == ("x",)  # besides


def test_a_function_in_a_jit_is_not_looked_into() -> None:
    assert sw.lower(lambda x: jitted(x, mode="down"), ROWS).argument_names == ("x",)


def test_unhashable_static_arguments_are_refused() -> None:
    with pytest.raises(sw.OptionError, match="cannot be hashed"):
        sw.lower(step, ROWS, mode=["up"], static_argnames="mode")


# ---- Flax NNX modules ------------------------------------------------------------------


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.embed = nnx.Param(jnp.ones((3, 4)))
        self.head = self.embed


def test_modules_that_share_a_variable_are_refused() -> None:
    with pytest.raises(sw.UnsupportedProgramError, match=r"model\.embed\.value and model\.head\.value are one Param"):
        sw.lower(lambda model: model.embed.sum(), Tied())


def test_what_a_module_keeps_is_an_output_and_what_is_returned_is_not_twice() -> None:
    counter = nnx.Rngs(0)
    assert sw.lower(lambda rngs: jax.random.normal(rngs(), ()), counter).output_names == (
        "result",
        "rngs.default.count.value",
    )
    both = sw.lower(lambda rngs: (jax.random.normal(rngs(), ()), rngs), counter)
    assert [name for name in both.output_names if not name.startswith("result")] == []
    graph, state = nnx.split(counter)
    pure = sw.lower(lambda state: jax.random.normal(nnx.merge(graph, state)(), ()), state)
    assert pure.output_names == ("result",)
