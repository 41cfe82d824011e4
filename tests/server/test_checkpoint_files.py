"""Checkpoint files by themselves: what counts as a checkpoint, what is cleaned up, and what others wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from shardwright import trees
from shardwright.errors import CheckpointError
from shardwright.server.runtime.checkpoints import files

TREE = trees.Node(kind="dict", children=(("w", trees.Leaf(name="w")),))
W = np.arange(24, dtype=np.float32).reshape(4, 6)


def halves() -> dict[str, files.Part]:
    blocks = tuple(((slice(0, 4), slice(at, at + 3)), W[:, at : at + 3]) for at in (0, 3))
    return {"w": files.Part(shape=W.shape, chunk=(4, 3), blocks=blocks)}


def save(directory: Path, step: int) -> None:
    files.begin(str(directory), step, "token")
    assert files.write(str(directory), step, "token", TREE, halves()) == W.nbytes
    files.commit(str(directory), step, "token")


def test_it_is_a_checkpoint_once_it_is_committed_and_not_before(tmp_path: Path) -> None:
    files.begin(str(tmp_path), 1, "token")
    assert files.steps(str(tmp_path)) == ()
    files.write(str(tmp_path), 1, "token", TREE, halves())
    assert files.steps(str(tmp_path)) == ()
    with pytest.raises(CheckpointError, match="no complete checkpoint 1"):
        files.contents(str(tmp_path), 1)
    files.commit(str(tmp_path), 1, "token")
    assert files.steps(str(tmp_path)) == (1,)
    (box,) = files.read(str(tmp_path), 1, [("w", (slice(1, 3), slice(2, 5)))])
    np.testing.assert_array_equal(box, W[1:3, 2:5])
    assert files.contents(str(tmp_path), 1).tree == TREE


def test_the_next_save_removes_what_an_interrupted_one_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    files.begin(str(tmp_path), 2, "token")
    files.write(str(tmp_path), 2, "token", TREE, halves())
    assert len(list(tmp_path.iterdir())) == 2
    save(tmp_path, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "7"]


def test_an_abandoned_save_leaves_nothing_and_touches_nothing_complete(tmp_path: Path) -> None:
    save(tmp_path, 1)
    files.begin(str(tmp_path), 2, "token")
    files.abandon(str(tmp_path), 2, "token")
    files.abandon(str(tmp_path), 1, "token")
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (3, 10, 20):
        save(tmp_path, step)
    files.keep_latest(str(tmp_path), 2)
    assert files.steps(str(tmp_path)) == (10, 20)


def test_a_worker_that_does_not_see_the_directory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SEEN_WITHIN_S", 0.3)
    with pytest.raises(CheckpointError, match="does not see the directory") as caught:
        files.write(str(tmp_path), 1, "token", TREE, halves())
    assert "that all workers share" in caught.value.remedy
    files.begin(str(tmp_path), 1, "another save of another time")
    with pytest.raises(CheckpointError, match="does not see the directory"):
        files.write(str(tmp_path), 1, "token", TREE, halves())


@pytest.mark.parametrize(
    "handler",
    [{}, {"use_zarr3": True}, {"use_ocdbt": False}],
    ids=lambda how: next(iter(how), "default"),
)
def test_what_others_write_with_orbax_is_read(tmp_path: Path, handler: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**handler)) as checkpointer:
        state = {"layers": [jax.numpy.asarray(W), {"n": 3}], "name": "a string", "nothing": None}
        checkpointer.save(tmp_path / "5", args=ocp.args.PyTreeSave(state))
    found = files.contents(str(tmp_path), 5)
    assert found.arrays["layers.0"] == files.StoredType(element_type="f32", shape=(4, 6))
    assert [leaf.name for leaf in trees.leaves_of(found.tree)] == ["layers.0", "layers.1.n", "name"]
    (box,) = files.read(str(tmp_path), 5, [("layers.0", (slice(0, 4), slice(2, 3)))])
    np.testing.assert_array_equal(box, W[:, 2:3])
