"""Saving and restoring with a real server: the numbers go on as before, under any plan, and in plain Orbax."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import shardwright as sw
from tests.client.models import adamw_step, batches, init_adamw

KEY = jax.random.key(0)


class State(NamedTuple):
    """What the tests train: a fused weight, a table that 8 does not divide, and other types."""

    fused: Any
    table: Any
    small: Any
    count: Any


def init_state(key: Any) -> State:
    return State(
        fused=jax.random.normal(key, (16, 64)) * 0.3,
        table=jax.random.normal(key, (29, 32)) * 0.3,
        small=jnp.ones((8, 8), jnp.bfloat16),
        count=jnp.zeros((), jnp.int32),
    )


def train(state: State, x: Any) -> tuple[State, Any]:
    def loss_of(fused: Any, table: Any) -> Any:
        gate, value = jnp.split(x @ fused, 2, axis=-1)
        return jnp.mean(((jax.nn.silu(gate) * value) @ table.T) ** 2)

    loss, (fused, table) = jax.value_and_grad(loss_of, argnums=(0, 1))(state.fused, state.table)
    new = State(state.fused - 0.1 * fused, state.table - 0.1 * table, state.small * 2, state.count + 1)
    return new, loss


X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
TENSOR: dict[str, Any] = {"mesh": "8", "force": "tensor"}


@pytest.fixture(scope="module")
def saved(session: sw.Session, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, State, list[float]]:
    """(directory, state of checkpoint 3, losses of the two steps after it); the arrays lie in a view, and padded."""
    directory = str(tmp_path_factory.mktemp("saved") / "run")
    step = session.parallelize(train, donate_argnums=0, **TENSOR)
    padded = session.parallelize(lambda table: table + 0, mesh="8", force={"table": {0: "data"}})
    state = step.init(init_state, KEY)
    for _ in range(3):
        state, _ = step(state, X)
    values = jax.tree.map(np.asarray, state)
    result = state._replace(table=padded(state.table))
    assert (result.fused._place.shape, result.fused._place.view_of) == ((16, 2, 32), (16, 64))
    assert (result.table._place.shape, result.table._place.stored_shape) == ((29, 32), (32, 32))
    save = step.save(result, directory, step=3)
    losses = []
    for _ in range(2):  # while it is written, into the same buffers
        state, loss = step(state, X)
        losses.append(float(loss))
    save.wait()
    assert save.written_bytes == sum(value.nbytes for value in values)
    return directory, values, losses


def test_it_goes_on_under_the_same_plan_to_the_last_bit(session: sw.Session, saved: Any) -> None:
    directory, _, losses = saved
    step = session.parallelize(train, donate_argnums=0, **TENSOR)
    state = step.restore(directory)
    assert type(state) is State
    _, loss = step(state, X)
    assert float(loss) == losses[0]


@pytest.mark.parametrize(
    "options", [{"force": "replicated"}, {"force": "fsdp"}, {"mesh": "2x4", "force": "mixed"}], ids=str
)
def test_it_goes_on_under_another_plan(session: sw.Session, saved: Any, options: Any) -> None:
    directory, _, losses = saved
    step = session.parallelize(train, donate_argnums=0, **options)
    state = step.restore(directory)
    results = []
    for number in range(2):
        state, loss = step(state, X)
        results.append(float(loss))
        assert int(state.count) == 4 + number
    np.testing.assert_allclose(results, losses, rtol=1e-5)


def test_what_was_saved_is_read_as_it_was(session: sw.Session, saved: Any) -> None:
    directory, values, _ = saved
    for restored, value in zip(session.restore(directory, step=3), values, strict=True):
        assert restored.dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(restored), value)


_PLAIN = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
path, step = sys.argv[1], 3
mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims)) for dims in [(None, "a"), ()])
with ocp.CheckpointManager(path) as manager:
    assert manager.latest_step() == step
    plain = manager.restore(step)
with ocp.CheckpointManager(path) as manager:
    as_jax = manager.restore(step, args=ocp.args.StandardRestore({
        "fused": jax.ShapeDtypeStruct((16, 64), np.float32, sharding=split),
        "table": jax.ShapeDtypeStruct((29, 32), np.float32, sharding=split),
        "small": jax.ShapeDtypeStruct((8, 8), jax.numpy.bfloat16, sharding=split),
        "count": jax.ShapeDtypeStruct((), np.int32, sharding=whole),
    }))
assert as_jax["fused"].sharding == split
np.savez(sys.argv[2], **{name: np.asarray(value, np.float32) for name, value in plain.items()})
np.savez(sys.argv[3], **{name: np.asarray(value, np.float32) for name, value in as_jax.items()})
assert not any(name.split(".")[0] == "shardwright" for name in sys.modules)
"""


def test_plain_jax_and_orbax_read_it_without_us(saved: Any, tmp_path: Path) -> None:
    directory, values, _ = saved
    files = [tmp_path / "numpy.npz", tmp_path / "jax.npz"]
    subprocess.run(
        [sys.executable, "-c", _PLAIN, directory, *map(str, files)],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, check=True, timeout=120,
        cwd=tmp_path,
    )  # fmt: skip
    for file in files:
        with np.load(file) as result:
            for name, value in values._asdict().items():
                np.testing.assert_array_equal(result[name], np.asarray(value, np.float32), err_msg=name)


@pytest.mark.dear
def test_what_plain_orbax_wrote_is_restored(session: sw.Session, tmp_path: Path) -> None:
    expected = jax.device_get(jax.jit(init_adamw)(KEY))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.StandardSave(expected))
    step = session.parallelize(adamw_step, donate_argnums=(0, 1), force="fsdp")
    params, opt_state = step.restore(tmp_path, like=jax.eval_shape(init_adamw, KEY))
    *_, loss = step(params, opt_state, next(batches(1)))
    *_, expected_loss = jax.jit(adamw_step)(*expected, next(batches(1)))
    assert abs(float(loss) - float(expected_loss)) <= 1e-5


def test_a_checkpoint_without_checksums_is_restored_with_one_warning(
    session: sw.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        session.save({"x": X}, tmp_path, step=number).wait()
    (tmp_path / "2" / "_shardwright_checksums").unlink()  # as earlier versions, and others, leave it
    for step in (1, 2, 2, None):
        np.testing.assert_array_equal(np.asarray(session.restore(tmp_path, step=step)["x"]), X)
    (warning,) = [record.getMessage() for record in caplog.records if "unchecked" in record.getMessage()]
    assert f"{tmp_path}/2" in warning


def test_an_initializer_whose_handles_are_only_a_pattern_does_not_run(session: sw.Session, saved: Any) -> None:
    directory, values, _ = saved
    step = session.parallelize(train, donate_argnums=0)
    before = max(each.last_step for each in session.status().sessions)
    state = step.restore(directory, like=step.init(init_state, KEY))
    assert max(each.last_step for each in session.status().sessions) == before
    np.testing.assert_array_equal(np.asarray(state.table), values.table)


def test_restoring_waits_for_a_save_that_is_under_way(session: sw.Session, tmp_path: Path) -> None:
    session.save({"w": np.ones((512, 512), np.float32)}, tmp_path, step=1)
    assert session.checkpoints(tmp_path) == (1,)
    session.save({"w": np.full((512, 512), 2, np.float32)}, tmp_path, step=2)
    assert np.asarray(session.restore(tmp_path)["w"])[0, 0] == 2


def test_a_part_of_a_checkpoint_is_restored(session: sw.Session, saved: Any) -> None:
    directory, values, _ = saved
    part = session.restore(directory, like={"table": jax.ShapeDtypeStruct((29, 32), np.float32)})
    np.testing.assert_array_equal(np.asarray(part["table"]), values.table)


def test_keys_numbers_and_other_arrays_of_the_client_are_saved_too(session: sw.Session, tmp_path: Path) -> None:
    key = jax.random.key(5, impl="rbg")
    state = {
        "keys": jax.random.split(KEY, 3),
        "key": key,
        "epoch": 4,
        "rate": 0.5,
        "done": np.array([True, False]),
        "half": np.ones(3, ml_dtypes.bfloat16),
        "nothing": None,
        "empty": ((), {}, []),
        "nested": {3: np.arange(4)},
    }
    session.save(state, tmp_path).wait()
    result = session.restore(tmp_path)
    assert jax.tree.structure(result) == jax.tree.structure(state)
    assert result["nested"].keys() == {3}
    assert (result["epoch"].item(), result["rate"].item()) == (4, 0.5)
    assert (result["epoch"].spec.weak_type, result["half"].dtype) == (True, ml_dtypes.bfloat16)
    assert jnp.array_equal(result["keys"].to_jax(), state["keys"])
    assert jnp.array_equal(result["key"].to_jax(), key)
    np.testing.assert_array_equal(np.asarray(result["done"]), state["done"])


def test_the_numbers_go_up_and_only_the_latest_are_kept(session: sw.Session, tmp_path: Path) -> None:
    assert session.checkpoints(tmp_path / "not there yet") == ()
    for number in range(4):
        assert session.save({"n": number}, tmp_path / "run", max_to_keep=2).step == number
    session.save({"n": 99}, tmp_path / "run", step=20).wait()
    assert session.checkpoints(tmp_path / "run") == (2, 3, 20)
    assert session.restore(tmp_path / "run")["n"].item() == 99
    assert session.restore(tmp_path / "run", step=2)["n"].item() == 2
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["2", "20", "3"]


def test_only_our_own_checkpoints_are_pruned(session: sw.Session, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}))
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "results.csv").write_text("1,2")
    (tmp_path / "7.orbax-checkpoint-tmp-123").mkdir()
    for number in (2, 3, 4):
        session.save({"n": number}, tmp_path, step=number, max_to_keep=1).wait()
    assert session.checkpoints(tmp_path) == (1, 4)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"1", "4", "2024", "7.orbax-checkpoint-tmp-123"}
    assert (tmp_path / "2024" / "results.csv").read_text() == "1,2"
    assert session.checkpoints("/proc") == ()
    with pytest.raises(sw.CheckpointError, match="2024 is there already, and is no checkpoint"):
        session.save({"n": 0}, tmp_path, step=2024).wait()


@pytest.mark.dear
def test_one_session_at_a_time_saves_in_a_directory(session: sw.Session, tmp_path: Path) -> None:
    assert session._state.server is not None
    held = f"session {session.info.session_id} saves in this directory"
    session.save({"n": 1}, tmp_path, step=1)
    neighbour = sw.connect(session._state.master.address, token=session._state.server.token)
    with neighbour, sw.connect(devices=1) as stranger:
        for other in (neighbour, stranger):
            with pytest.raises(sw.CheckpointError, match=held):
                other.save({"n": 2}, tmp_path, step=2).wait()
            assert other.restore(tmp_path, step=1)["n"].item() == 1
        session.save({"n": 2}, tmp_path, step=2).wait()
        assert session.checkpoints(tmp_path) == (1, 2)

        killed = sw.connect(devices=1)
        assert killed._state.server is not None
        killed.save({"n": 1}, tmp_path / "run", step=1).wait()
        with pytest.raises(sw.CheckpointError, match=f"session {killed.info.session_id} saves"):
            stranger.save({"n": 2}, tmp_path / "run", step=2).wait()
        killed._state.server._process.kill()
        killed._state.server._process.wait()
        stranger.save({"n": 2}, tmp_path / "run", step=2).wait()
        neighbour.save({"n": 1}, tmp_path / "other", step=1).wait()
    session.save({"n": 2}, tmp_path / "other", step=2).wait()  # they are closed
    session.save({"n": 3}, tmp_path / "run", step=3).wait()
    assert session.checkpoints(tmp_path / "run") == (1, 2, 3)


def test_directories_mean_what_they_do_in_a_shell_or_are_refused(
    session: sw.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session._state.server is not None
    monkeypatch.chdir(tmp_path)
    session.save({"n": 1}, "runs/relative").wait()
    assert session.checkpoints(tmp_path / "runs" / "relative") == (0,)
    with sw.connect(session._state.master.address, token=session._state.server.token) as remote:
        for directory in ("", "runs/relative", "~/runs"):
            for act in (remote.checkpoints, remote.restore, lambda name: remote.save({"n": 1}, name)):
                with pytest.raises(sw.CheckpointError, match="the checkpoint directory"):
                    act(directory)
        assert remote.checkpoints(tmp_path / "runs" / "relative") == (0,)


# ---- pipelines ----------------------------------------------------------------------------


def init_layers(key: Any) -> tuple[Any, Any]:
    """Four equal layers, stacked, and their momentum."""
    params = {"layers": jax.random.normal(key, (4, 16, 16)) * 0.3, "head": jax.random.normal(key, (16, 16)) * 0.1}
    return params, jax.tree.map(jnp.zeros_like, params)


def train_layers(params: Any, momentum: Any, x: Any) -> tuple[Any, Any, Any]:
    def loss_of(params: Any) -> Any:
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
        return jnp.mean((hidden @ params["head"] - x) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss


@pytest.mark.dear
def test_a_pipeline_goes_on_as_one_program_and_back_again(session: sw.Session, tmp_path: Path) -> None:
    pipeline = session.parallelize(train_layers, donate_argnums=(0, 1), stages=2, micro_batches=2, schedule="1f1b")
    state: Any = pipeline.init(init_layers, KEY)
    *state, _ = pipeline(*state, X)
    assert "rows 2:4" in state[0]["layers"].sharding, "each stage has its own layers"
    pipeline.save(state, tmp_path, step=1)
    *state, expected = pipeline(*state, X)
    program = session.parallelize(train_layers, donate_argnums=(0, 1), mesh="8", force="fsdp")
    *restored, loss = program(*program.restore(tmp_path), X)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    program.save(restored, tmp_path, step=2)
    *_, expected = pipeline(*state, X)
    *_, loss = pipeline(*pipeline.restore(tmp_path), X)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


# ---- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 3])
def test_a_number_that_does_not_come_after_the_others_is_refused(session: sw.Session, saved: Any, step: int) -> None:
    with pytest.raises(sw.CheckpointError, match=f"checkpoint 3 is there already, and {step} does not come after it"):
        session.save({"n": 1}, saved[0], step=step).wait()
    assert session.checkpoints(saved[0]) == (3,)


def test_a_directory_that_cannot_be_written(session: sw.Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    save = session.save({"n": 1}, tmp_path / "file" / "run", step=1)
    with pytest.raises(sw.CheckpointError, match=r"cannot be written: (NotADirectory|FileExists)Error"):
        session.save({"n": 1}, tmp_path / "other")  # the next save says it
    assert save.is_done
    session.save({"n": 1}, tmp_path / "other").wait()
    assert float(session.parallelize(lambda x: x * 2)(2.0)) == 4.0, "steps go on"


@pytest.mark.cluster
def test_a_flipped_bit_is_never_restored(session: sw.Session, two_workers: sw.Session, tmp_path: Path) -> None:
    """Of any file that two workers wrote, each its part, by one that wants other parts of all, or of some."""
    values = {"w": np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32), "b": np.arange(512.0) / 3}
    split = two_workers.parallelize(lambda w, b: (w * 1, b * 1), force={"w": {0: "data"}, "b": {0: "data"}})
    two_workers.save(dict(zip("wb", split(values["w"], values["b"]), strict=True)), tmp_path / "good", step=1).wait()
    other = session.parallelize(lambda w: w.T + 0, mesh="8", force={"w": {1: "data"}})
    expected = {name: np.asarray(value, np.float32) for name, value in values.items()}
    random, refused = np.random.default_rng(2), list[tuple[str, str]]()
    files = [path.relative_to(tmp_path / "good") for path in (tmp_path / "good").rglob("*") if path.is_file()]
    assert len([file for file in files if file.parent.name == "d"]) > 2, "two processes wrote"
    for number, file in enumerate(sorted(files) * 3):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        data = bytearray((folder / file).read_bytes())
        data[random.integers(len(data))] ^= 1 << random.integers(8)
        (folder / file).write_bytes(data)
        try:
            state = session.restore(folder)
            np.testing.assert_array_equal(np.asarray(other(state["w"])), expected["w"].T, err_msg=str(file))
            part = session.restore(folder, like={"b": jax.ShapeDtypeStruct((512,), np.float32)})
            np.testing.assert_array_equal(np.asarray(part["b"]), expected["b"], err_msg=str(file))
        except sw.CheckpointError as error:
            refused.append((str(file), str(error)))
    assert len(refused) > len(files) // 2
    for file_name, text in refused:
        assert file_name in text
        assert "'w'" in text or "'b'" in text
    assert float(session.parallelize(lambda x: x * 2)(2.0)) == 4.0, "steps go on"


@pytest.mark.cluster
def test_a_save_right_after_failed_ones(two_workers: sw.Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for number in range(1, 6):
        with pytest.raises(sw.CheckpointError, match="cannot be written"):
            two_workers.save({"n": number}, tmp_path / "file" / "run", step=1).wait()
        two_workers.save({"n": number}, tmp_path / "run", step=number).wait()
        assert two_workers.restore(tmp_path / "run")["n"].item() == number
    for _ in range(5):
        with pytest.raises(sw.CheckpointError, match="cannot be written"):
            two_workers.save({"n": 0}, tmp_path / "file" / "run", step=1).wait()
    two_workers.save({"n": 6}, tmp_path / "run", step=6).wait()
    assert two_workers.checkpoints(tmp_path / "run") == (1, 2, 3, 4, 5, 6)


def test_nothing_to_restore(session: sw.Session, saved: Any, tmp_path: Path) -> None:
    with pytest.raises(sw.CheckpointError, match="no complete checkpoint"):
        session.restore(tmp_path)
    with pytest.raises(sw.CheckpointError, match="no complete checkpoint 4"):
        session.restore(saved[0], step=4)


def test_a_checkpoint_that_does_not_fit(session: sw.Session, saved: Any) -> None:
    with pytest.raises(sw.CheckpointError, match=r"no array 'bias'; it has count, fused, small, table"):
        session.restore(saved[0], like={"bias": 1.0})
    with pytest.raises(sw.CheckpointError, match=r"table is f32\[32, 32\], but f32\[29, 32\] in the checkpoint"):
        session.restore(saved[0], like={"table": jax.ShapeDtypeStruct((32, 32), np.float32)})


def test_a_checkpoint_of_which_a_file_is_gone(session: sw.Session, tmp_path: Path) -> None:
    session.save({"w": np.ones((64, 64), np.float32)}, tmp_path, step=1).wait()
    restored = session.restore(tmp_path)
    for data in (tmp_path / "1" / "default").rglob("d/*"):
        data.unlink()
    with pytest.raises(sw.CheckpointError, match="checkpoint 1 cannot be read"):
        np.asarray(restored["w"])


def _flip(data: bytes) -> bytes:
    """With some wrong bits in the middle and at the end."""
    damaged = bytearray(data)
    for at in (len(data) // 2, len(data) // 2 + 1, len(data) - 1):
        damaged[at % len(data)] ^= 0x41
    return bytes(damaged)


#: What may become of a file's contents; None: the file is gone.
DAMAGES: dict[str, Any] = {
    "deleted": lambda data: None,
    "emptied": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "flipped": _flip,
    "garbled": lambda data: np.random.default_rng(len(data)).bytes(len(data)),
}


@pytest.mark.dear
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error_or_not_needed(session: sw.Session, tmp_path: Path, damage: str) -> None:
    """Whichever file of a checkpoint it is: nothing is restored wrongly."""
    values = {"w": np.arange(96, dtype=np.float32).reshape(8, 12), "n": np.asarray(7, np.int32)}
    session.save(values, tmp_path / "good", step=1).wait()
    files = [path.relative_to(tmp_path / "good") for path in sorted((tmp_path / "good").rglob("*")) if path.is_file()]
    assert len(files) > 5
    refused = 0
    for number, file in enumerate(files):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "good", folder)
        contents = DAMAGES[damage]((folder / file).read_bytes() or b"x")
        (folder / file).unlink()
        if contents is not None:
            (folder / file).write_bytes(contents)
        for step in (1, None):
            try:
                restored = {name: np.asarray(value) for name, value in session.restore(folder, step=step).items()}
            except sw.CheckpointError:
                refused += 1
                continue
            assert restored.keys() == values.keys(), (file, damage)
            for name, value in values.items():
                assert restored[name].dtype == value.dtype, (file, damage)
                np.testing.assert_array_equal(restored[name], value, err_msg=f"{file} {damage}")
    assert refused
    assert float(session.parallelize(lambda x: x * 2)(2.0)) == 4.0, "steps go on"


@pytest.mark.dear
def test_a_state_that_cannot_be_saved(session: sw.Session, tmp_path: Path) -> None:
    with pytest.raises(sw.CheckpointError, match="no array"):
        session.save({"nothing": None}, tmp_path)
    with pytest.raises(sw.CheckpointError, match=r"a\.w has no elements"):
        session.save({"a": {"w": np.ones((3, 0))}}, tmp_path)
    with pytest.raises(sw.CheckpointError, match=r"two arrays of the state are called 'a\.b'"):
        session.save({"a": {"b": 1}, "a.b": 2}, tmp_path)
    with pytest.raises(sw.OptionError, match="max_to_keep=0"):
        session.save({"n": 1}, tmp_path, max_to_keep=0)
    step = session.parallelize(train, donate_argnums=0)
    state = step.init(init_state, KEY)
    step(state, X)
    with pytest.raises(sw.ArrayError, match="donated to train"):
        step.save(state, tmp_path)
    assert session.checkpoints(tmp_path) == ()


@jax.tree_util.register_dataclass
@dataclass
class Unknown:
    """A node that only this program can make."""

    w: Any


def test_a_node_that_only_the_program_can_make_needs_a_pattern(session: sw.Session, tmp_path: Path) -> None:
    session.save({"model": Unknown(np.ones(3))}, tmp_path).wait()
    with pytest.raises(sw.CheckpointError, match=r"holds a .*Unknown") as caught:
        session.restore(tmp_path)
    assert "like=" in caught.value.remedy
    restored = session.restore(tmp_path, like={"model": Unknown(np.zeros(3))})
    np.testing.assert_array_equal(np.asarray(restored["model"].w), np.ones(3))


@pytest.mark.dear
def test_closing_waits_for_the_save_and_says_what_went_wrong(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np, shardwright as sw\n"
        "with sw.connect(devices=1) as session:\n"
        "    session.save({'w': np.ones((256, 256))}, sys.argv[1], step=1)\n"
        "session = sw.connect(devices=1)\n"
        "session.save({'w': np.ones(4)}, '/proc/nowhere', step=1)\n"
        "try:\n"
        "    session.close()\n"
        "except sw.CheckpointError as error:\n"
        "    print(error.where)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "/proc/nowhere"
    assert json.loads((tmp_path / "1" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]


def test_what_no_checkpoint_holds_is_named(session: sw.Session, tmp_path: Path) -> None:
    state = {"w": np.ones(3, np.float32), "meta": {"name": "first"}}
    with pytest.raises(sw.UnsupportedProgramError, match=r"^meta\.name: the state holds what cannot be saved: a str"):
        session.save(state, tmp_path)
