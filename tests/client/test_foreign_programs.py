"""HLO from elsewhere as a step: its own types and state, by position or name, beside plain JAX with x64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.client.exported_step import ROWS, STEPS, batch, start

NAMES = ("w", "b", "count", "key", "x", "labels")
STATE = NAMES[:4]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    subprocess.run([sys.executable, "-m", "tests.client.exported_step", str(folder)], check=True)
    return folder


def check_state(state: Sequence[Any], losses: Sequence[Any], exported: Path) -> None:
    """State and losses are those of plain JAX, in its 64-bit types."""
    expected = np.load(exported / "expected.npz")
    for number, handle in enumerate(state):
        wanted = expected[f"arr_{number}"]
        assert handle.dtype == wanted.dtype
        np.testing.assert_allclose(np.asarray(handle), wanted, rtol=1e-6 if wanted.dtype == np.float32 else 1e-12)
    np.testing.assert_allclose([float(loss) for loss in losses], expected["losses"], rtol=1e-7)


@pytest.fixture(autouse=True)
def without_x64() -> None:
    assert not jax.config.jax_enable_x64, "these tests are about a client without it"


@pytest.mark.parametrize("name", ["train.hlo", "train.pb", "train.mlirbc", "donated.mlir"])
def test_steps_are_those_of_plain_jax(session: sw.Session, exported: Path, name: str) -> None:
    step = session.program(exported / name, names=NAMES, donated=STATE, force="data")
    state: Sequence[Any] = start()
    losses = []
    for number in range(STEPS):
        before = state
        *state, loss = step(*state, *batch(number))
        losses.append(loss)
    assert all(handle.is_deleted() for handle in before)
    assert int(state[2]) == 2**40 * (STEPS + 1) + 1
    check_state(state, losses, exported)
    assert [variable.name for variable in step.plan.parameters] == list(NAMES)
    assert "labels" in step.plan.explain()


def test_state_is_what_the_text_aliases(session: sw.Session, exported: Path) -> None:
    text = (exported / "donated.hlo").read_text()
    assert session.program(text).lower().aliases == {n: n for n in range(4)}
    kept = session.program(text, donated=(), force="data")
    assert kept.lower().aliases == {}
    assert "input_output_alias" not in kept.lower().as_text()
    one = session.program(text, donated="count.1", force="data")
    assert one.lower().donated == {2}
    state, rest = start(), batch(0)
    handles = kept(*state, *rest)[:4]
    again = kept(*handles, *rest)
    assert not any(handle.is_deleted() for handle in handles)
    changed = one(*handles, *rest)
    assert [handle.is_deleted() for handle in handles] == [False, False, True, False]
    np.testing.assert_allclose(changed[0], again[0], rtol=1e-12)


def test_programs_share_one_state(session: sw.Session, exported: Path) -> None:
    results = {"state": {name: number for number, name in enumerate(STATE)}, "loss": 4}
    train = session.program(exported / "train.hlo", donated=STATE, results=results, force="data")
    score = session.program(exported / "eval.hlo")
    state: dict[str, Any] = dict(zip(STATE, start(), strict=True))
    losses, scores = [], []
    x, labels = batch(99)
    for number in range(STEPS):
        inputs = dict(zip(("x", "labels"), batch(number), strict=True))
        result = train(**state, **inputs)
        state = result["state"]
        losses.append(result["loss"])
        scores.append(score(state["w"], state["b"], labels=labels, x=x))
    check_state([state[name] for name in STATE], losses, exported)
    np.testing.assert_allclose([float(s) for s in scores], np.load(exported / "expected.npz")["scores"], rtol=1e-7)
    assert not state["w"].is_deleted()
    assert train.lower().output_names == (*(f"result['state'][{name!r}]" for name in STATE), "result['loss']")


def test_checkpoints_hold_64_bits(session: sw.Session, exported: Path, tmp_path: Path) -> None:
    step = session.program(exported / "train.hlo", donated=STATE, force="data")
    *state, _ = step(*start(), *batch(0))
    step.save(dict(zip(STATE, state, strict=True)), tmp_path, step=1).wait()
    restored = step.restore(tmp_path)
    assert [str(restored[name].dtype) for name in STATE] == ["float64", "float32", "int64", "uint32"]
    zeros = {name: np.zeros_like(value) for name, value in zip(STATE, start(), strict=True)}
    assert session.restore(tmp_path, like=zeros)["count"].dtype == np.int64
    with pytest.raises(sw.CheckpointError, match=r"count holds integers of int64 beyond int32(.|\n)*enable_x64"):
        step.save({"count": start()[2]}, tmp_path)
    *expected, _ = step(*state, *batch(1))
    *again, _ = step(*(restored[name] for name in STATE), *batch(1))
    for one, other in zip(expected, again, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_state_of_64_bits_is_born_on_the_servers(session: sw.Session, exported: Path) -> None:
    step = session.program(exported / "train.hlo", donated=STATE, force="data")
    with jax.enable_x64(True):
        state = step.init(lambda: tuple(jnp.asarray(value) for value in start()))
    losses = []
    for number in range(STEPS):
        *state, loss = step(*state, *batch(number))
        losses.append(loss)
    check_state(state, losses, exported)


@pytest.mark.dear
def test_stages_read_what_one_of_them_updates_in_place(session: sw.Session, exported: Path) -> None:
    step = session.program(exported / "train.pb", names=NAMES, donated=STATE, stages=2, micro_batches=2)
    state: Sequence[Any] = start()
    for number in range(STEPS):
        *state, _ = step(*state, *batch(number))
    assert int(state[2]) == 2**40 * (STEPS + 1) + 1


@pytest.mark.cluster
@pytest.mark.parametrize("options", [{"mesh": "2x4"}, {"stages": 2, "micro_batches": 2}], ids=["mesh", "pipeline"])
def test_two_workers_share_a_program(two_workers: sw.Session, exported: Path, options: Any) -> None:
    """In the pipeline both stages read the counter, which one of them updates in place."""
    step = two_workers.program(exported / "train.pb", names=NAMES, donated=STATE, **options)
    state: Sequence[Any] = start()
    losses = []
    for number in range(STEPS):
        *state, loss = step(*state, *batch(number))
        losses.append(loss)
    if "stages" not in options:  # micro-batches draw noise of their own
        check_state(state, losses, exported)
    assert int(state[2]) == 2**40 * (STEPS + 1) + 1
    assert state[0].dtype == np.float64


def test_arrays_of_64_bits_change_their_layout(session: sw.Session, exported: Path) -> None:
    step = session.program(exported / "eval.hlo", mesh="8", force={"x": {0: "data"}})
    other = session.program(exported / "eval.hlo", mesh="2x4", force={"x": {1: "model"}})
    make = session.program("""HloModule make
        ENTRY e { s = f64[] parameter(0)
        ROOT x = f64[16,12]{1,0} broadcast(s), dimensions={} }""")
    x = make(1 / 3)
    assert isinstance(x, sw.RemoteArray), "no tuple, no tuple"
    w, b, *_ = start()
    labels = batch(0)[1]
    np.testing.assert_allclose(float(step(w, b, x, labels)), float(other(w, b, x, labels)), rtol=1e-12)
    np.testing.assert_array_equal(np.asarray(x), 1 / 3)


def test_planning_needs_no_arguments(session: sw.Session, exported: Path) -> None:
    step = session.program(exported / "train.hlo", name="fit", force="data")
    assert step.compile() is step.plan
    assert repr(step) == "Step(fit, data=8)"
    types = [jax.ShapeDtypeStruct((ROWS, 12), jnp.float32)]
    with pytest.raises(sw.ArgumentError, match="w, b, count, key, labels were not passed"):
        step.compile(x=types[0])


HLO = """HloModule nested
ENTRY e {
  n = s32[2]{0} parameter(0)
  x = f32[4]{0} parameter(1)
  small = s8[4]{0} parameter(2)
  flag = pred[] parameter(3)
  y = f32[4]{0} negate(x)
  inner = (s32[2]{0}, s8[4]{0}) tuple(n, small)
  ROOT out = (f32[4]{0}, (s32[2]{0}, s8[4]{0})) tuple(y, inner)
}
"""


def test_results_follow_the_tuples_of_the_text(session: sw.Session) -> None:
    step = session.program(HLO)
    y, (n, small) = step([1, 2], jnp.ones(4, jnp.bfloat16), np.arange(4), flag=True)
    np.testing.assert_array_equal(y, -np.ones(4))
    np.testing.assert_array_equal(n, [1, 2])
    assert small.dtype == np.int8
    assert step.lower().output_names == ("result[0]", "result[1][0]", "result[1][1]")
    chosen = session.program(HLO, results={"y": 0})([1, 2], np.ones(4), np.zeros(4, np.int8), False)
    assert list(chosen) == ["y"]


ROW = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([1, 2], ROW, ROW.astype(np.int8)), "flag were not passed"),
        (([1, 2], ROW, [1, 2, 3, 4], True, 5), "5 arguments were passed; there are 4"),
        (([1, 2, 3], ROW, [1, 2, 3, 4], True), r"n: s64\[3\] was passed for s32\[2\]"),
        (([1, 2**31], ROW, [1, 2, 3, 4], True), r"n: s64\[2\] was passed for s32\[2\](.|\n)*from 1 to 2147483648"),
        (([1.5, 2], ROW, [1, 2, 3, 4], True), r"n: f64\[2\] was passed(.|\n)*astype\('int32'\)"),
        (([1, 2], 1j * ROW, [1, 2, 3, 4], True), r"x: c64\[4\] was passed for f32\[4\]"),
        (([1, 2], ROW, [1, 2, 3, 400], True), r"small: .* was passed for s8\[4\](.|\n)*from -128 to 127"),
    ],
)
def test_arguments_that_do_not_fit_are_named(session: sw.Session, args: Any, message: str) -> None:
    with pytest.raises(sw.ArgumentError, match=message) as caught:
        session.program(HLO)(*args)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("value", ["text", None, object(), np.array(["a"]), {"a": 1}, [[1], [2, 3]]])
def test_what_is_no_array_is_refused_by_name(session: sw.Session, value: Any) -> None:
    with pytest.raises(sw.ShardwrightError) as caught:
        session.program(HLO)([1, 2], value, [1, 2, 3, 4], True)
    assert caught.value.where == "x"


def test_arguments_may_have_any_name(session: sw.Session) -> None:
    step = session.program(HLO, names=["self", "params['x']", "args", "a b"])
    arguments = dict(zip(step.lower().argument_names, ([1, 2], ROW, [1, 2, 3, 4], True), strict=True))
    np.testing.assert_array_equal(step(**arguments)[0], -ROW)


def test_names_of_arguments_are_checked(session: sw.Session) -> None:
    step = session.program(HLO, names={0: "number", "small": "tiny"})
    assert step.lower().argument_names == ("number", "x", "tiny", "flag")
    with pytest.raises(sw.ArgumentError, match=r"there is no argument 'numbre'(.|\n)*'number'"):
        step(numbre=1)
    with pytest.raises(sw.ArgumentError, match="number was passed twice"):
        step([1, 2], number=[1, 2])
    handle = session.program(HLO)([1, 2], ROW, [1, 2, 3, 4], True)[0]
    with pytest.raises(sw.ArgumentError, match=r"number: f32\[4\] was passed for s32\[2\]"):
        step(handle, ROW, [1, 2, 3, 4], True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["a", "b"]}, "names: 2 names, but the program has 4 arguments"),
        ({"names": {4: "a"}}, "names: the program has no argument 4"),
        ({"names": {"flog": "a"}}, r"no argument 'flog'(.|\n)*did you mean 'flag'"),
        ({"names": {0: "x"}}, "two arguments are called 'x'"),
        ({"names": ["a", "b", "c", 4]}, "4 is no name of argument 3"),
        ({"names": "abcd"}, "str is no list of names"),
        ({"donated": ["y"]}, "donated: the program has no argument 'y'"),
        ({"donated": 1.5}, "donated: 1.5 names no arguments"),
        ({"donated": 9}, "donated: the program has no argument 9"),
        ({"results": {"a": 3}}, r"results\['a'\]: 3 is no output"),
        ({"results": [0, "y"]}, r"results\[1\]: 'y' is no output"),
        ({"results": (0, 0)}, "an output stands twice"),
        ({"mesh": "much"}, "mesh"),
    ],
)
def test_wrong_options_are_named(session: sw.Session, options: dict[str, Any], message: str) -> None:
    with pytest.raises(sw.OptionError, match=message):
        session.program(HLO, **options)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("HloModule m\nENTRY e { ROOT x = f32[] parameter(0)", sw.HloSyntaxError, "2:"),
        ("step.hlo", sw.HloSyntaxError, r"no program(.|\n)*pathlib.Path\('step.hlo'\)"),
        ("HloModule m\nENTRY e { ROOT c = f32[4]{0} constant({...}) }", sw.UnsupportedProgramError, "hlo_serialized"),
        ("HloModule m\nENTRY e { ROOT t = token[] parameter(0) }", sw.UnsupportedProgramError, "t: a token"),
        ("HloModule m\nENTRY e { ROOT x = f32[<=4]{0} parameter(0) }", sw.UnsupportedProgramError, "no fixed size"),
    ],
)
def test_programs_that_cannot_run_are_refused(session: sw.Session, text: str, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        session.program(text)


def test_donated_arguments_are_paired_by_type(session: sw.Session) -> None:
    step = session.program(HLO, donated=["x", "flag"])
    assert step.lower().aliases == {0: 1}
    assert "input_output_alias={ {0}: (1, {}, may-alias) }" in step.lower().as_text()
    first = step([1, 2], ROW, [1, 2, 3, 4], True)
    second = step(first[1][0], first[0], first[1][1], True)
    assert [first[0].is_deleted(), first[1][0].is_deleted()] == [True, False]
    np.testing.assert_array_equal(second[0], ROW)


def test_keys_are_their_words(session: sw.Session) -> None:
    step = session.program("""HloModule m, input_output_alias={ {}: (0, {}, may-alias) }
        ENTRY e { key = u32[2]{0} parameter(0)
        one = u32[] constant(1)
        more = u32[2]{0} broadcast(one), dimensions={}
        ROOT next = u32[2]{0} add(key, more) }""")
    key = step(jax.random.key(5))
    np.testing.assert_array_equal(step(key), [2, 7])
    assert key.is_deleted()
