"""Checkpoint files by themselves: what counts as a checkpoint, what is cleaned up, and what others wrote."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from shardwright.checkpoints import trees
from shardwright.errors import CheckpointError
from shardwright.server.runtime.checkpoints import checksums, claims, files
from shardwright.server.tuning import LEASE_S
from tests.recovery.small_disk import small_disk

TREE = trees.Node(kind="dict", children=(("w", trees.Leaf(name="w")),))
W = np.arange(24, dtype=np.float32).reshape(4, 6)


def halves() -> dict[str, files.ArrayPart]:
    blocks = tuple(((slice(0, 4), slice(at, at + 3)), W[:, at : at + 3]) for at in (0, 3))
    return {"w": files.ArrayPart(shape=W.shape, chunk=(4, 3), blocks=blocks)}


def save(directory: Path, step: int, token: str = "token") -> None:
    files.begin(str(directory), step, token)
    assert files.write(str(directory), step, token, TREE, halves()) == W.nbytes
    files.commit(str(directory), step, token)


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


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory with room for hardly more than one small checkpoint."""
    with small_disk(tmp_path, 256 << 10) as disk:
        if not disk.is_mount():  # only root may mount one
            pytest.skip("this process may not mount a disk")
        yield disk


def test_a_full_disk_is_called_one_and_what_was_complete_stays(full_disk: Path) -> None:
    save(full_disk, 1)
    files.begin(str(full_disk), 2, "token")
    (full_disk / "other").write_bytes(b"x" * (64 << 10))
    large = np.random.default_rng(0).normal(size=(256, 256))
    parts = {
        "w": files.ArrayPart(shape=large.shape, chunk=large.shape, blocks=(((slice(0, 256), slice(0, 256)), large),))
    }
    with pytest.raises(CheckpointError, match="cannot be written: its disk is full") as refusal:
        files.write(str(full_disk), 2, "token", TREE, parts)
    assert "free space" in refusal.value.remedy
    files.abandon(str(full_disk), 2, "token")
    assert files.steps(str(full_disk)) == (1,)


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (3, 10, 20):
        save(tmp_path, step)
    files.keep_latest(str(tmp_path), 2)
    assert files.steps(str(tmp_path)) == (10, 20)


def test_a_worker_that_does_not_see_the_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not see the directory") as caught:
        files.write(str(tmp_path), 1, "token", TREE, halves(), visible_s=0.3)
    assert "that all workers share" in caught.value.remedy
    files.begin(str(tmp_path), 1, "another save of another time")
    with pytest.raises(CheckpointError, match="does not see the directory"):
        files.write(str(tmp_path), 1, "token", TREE, halves(), visible_s=0.3)


def snapshot(folder: Path) -> dict[str, bytes | str | None]:
    """All that is under it, without following links."""
    entries: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        entries[name] = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return entries


def plain_orbax(directory: Path, step: int) -> None:
    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": W}))


def test_nothing_that_is_no_checkpoint_of_ours_is_listed_or_touched(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", 1)
    run, others = tmp_path / "run", ("5", "0007", "2024", "1.orbax-checkpoint-tmp-123", "2.orbax-checkpoint-tmp")
    plain_orbax(run, 1)
    save(run, 2)
    shutil.copytree(run / "2", run / "3")
    (run / "3" / "_CHECKPOINT_METADATA").unlink()  # Orbax's metadata is gone
    shutil.copytree(run / "2", run / "4")
    (run / "4" / "commit_success.txt").unlink()  # and here every mark of the commit
    (run / "4" / checksums.FILE).unlink()
    (run / "4" / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {}, "commit_timestamp_nsecs": null}')
    for name in others:
        (run / name).mkdir()
        (run / name / "results.csv").write_text("1,2")
    (run / "6").write_text("a file")
    (run / "7").symlink_to(tmp_path / "elsewhere")
    (run / "8").symlink_to("nowhere")
    (run / "8.orbax-checkpoint-tmp-shardwright-x").symlink_to(tmp_path / "elsewhere")
    (run / "9").mkdir()
    (run / "9" / "_CHECKPOINT_METADATA").write_text("[")
    before = snapshot(tmp_path)
    assert files.steps(str(run)) == (1, 2)
    for step in (20, 30):
        save(run, step)
        files.keep_latest(str(run), 1)
    assert files.steps(str(run)) == (1, 30)
    after = snapshot(tmp_path)
    own = [name for name in before if Path(name).parts[:2] == ("run", "2") or name.endswith(claims.FILE)]
    assert {name: before[name] for name in before if name not in own} == {
        name: after[name] for name in after if Path(name).parts[:2] != ("run", "30") and not name.endswith(claims.FILE)
    }


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link", "half a checkpoint"])
def test_a_number_that_names_something_else_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1)
    place = tmp_path / "2024"
    if kind == "file":
        place.write_text("results")
    elif "link" in kind:
        place.symlink_to("1.x" if "dangling" in kind else tmp_path.parent)
    else:
        place.mkdir()
    if kind == "half a checkpoint":
        (place / "default").mkdir()
    with pytest.raises(CheckpointError, match="2024 is there already, and is no checkpoint") as caught:
        save(tmp_path, 2024)
    assert "step=" in caught.value.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2024"]
    save(tmp_path, 2025)


def test_what_somebody_has_put_into_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "1" / "notes.txt").write_text("the best one")
    files.keep_latest(str(tmp_path), 1)
    assert files.steps(str(tmp_path)) == (1, 3)


def test_a_folder_that_appears_while_a_save_is_written_stays(tmp_path: Path) -> None:
    files.begin(str(tmp_path), 1, "token")
    files.write(str(tmp_path), 1, "token", TREE, halves())
    plain_orbax(tmp_path, 1)
    before = snapshot(tmp_path / "1")
    with pytest.raises(CheckpointError, match="cannot be written"):
        files.commit(str(tmp_path), 1, "token")
    files.abandon(str(tmp_path), 1, "token")
    assert snapshot(tmp_path / "1") == before
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_file_is_no_directory_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for act in (files.steps, lambda directory: files.begin(directory, 1, "token")):
        with pytest.raises(CheckpointError, match="a file, not a directory"):
            act(str(tmp_path / "file"))


# ---- who saves ----------------------------------------------------------------------------


def test_the_first_session_holds_the_directory_until_it_is_closed(tmp_path: Path) -> None:
    save(tmp_path, 1, "first/1")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="session first saves in this directory") as caught:
            files.begin(str(tmp_path), 2, "second/1")
        assert "close that session" in caught.value.remedy
        save(tmp_path, max(files.steps(str(tmp_path))) + 1, "first/2")
    files.begin(str(tmp_path), 4, "second/1", lambda session_id: session_id != "first")
    with pytest.raises(CheckpointError, match="session second saves"):
        files.begin(str(tmp_path), 5, "third/1")
    assert claims.read(tmp_path / "3") is None


def test_a_save_that_is_under_way_holds_it_too_and_completes(tmp_path: Path) -> None:
    files.begin(str(tmp_path), 1, "first/1")
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="session first saves"):
            files.begin(str(tmp_path), step, "second/1")
    files.write(str(tmp_path), 1, "first/1", TREE, halves())
    files.commit(str(tmp_path), 1, "first/1")
    assert files.steps(str(tmp_path)) == (1,)


def foreign_claim(folder: Path, *, age_s: float = 0, **changes: Any) -> None:
    """As a session of another server has left it in the folder of a save."""
    claim = claims.read(folder)
    assert claim is not None
    (folder / claims.FILE).write_text(json.dumps({**asdict(claim), **changes}))
    renewed_s = time.time() - age_s
    os.utime(folder / claims.FILE, (renewed_s, renewed_s))


@pytest.mark.parametrize(
    ("changes", "is_held"),
    [
        ({"pid": os.getpid(), "started": "another process of that number"}, False),
        ({"pid": 2**22 + 1}, False),  # no process has that number
        ({"machine": "another"}, True),
        ({"machine": "another", "age_s": LEASE_S + 2}, False),
        ({"directory": "/from/which/it/was/copied"}, False),
    ],
    ids=["number used again", "killed", "another machine", "lapsed", "copy"],
)
def test_a_claim_that_nobody_stands_for_does_not_block(tmp_path: Path, changes: Any, is_held: bool) -> None:
    save(tmp_path, 1, "first/1")
    files.begin(str(tmp_path), 2, "first/2")
    for folder in tmp_path.iterdir():
        foreign_claim(folder, **changes)
    if is_held:
        with pytest.raises(CheckpointError, match="session first saves") as caught:
            save(tmp_path, 3, "second/1")
        assert "killed" in caught.value.remedy
        assert len(list(tmp_path.iterdir())) == 2
    else:
        save(tmp_path, 3, "second/1")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
        assert claims.read(tmp_path / "1") is None


def test_who_was_silent_for_too_long_does_not_complete_what_another_has_taken_over(tmp_path: Path) -> None:
    files.begin(str(tmp_path), 1, "first/1")
    files.write(str(tmp_path), 1, "first/1", TREE, halves())
    save_of_second = (str(tmp_path), 1, "second/1")
    files.begin(*save_of_second, lambda session_id: False)
    with pytest.raises(CheckpointError, match="another session has taken the directory over"):
        files.commit(str(tmp_path), 1, "first/1")
    files.abandon(str(tmp_path), 1, "first/1")
    files.write(*save_of_second, TREE, halves())
    files.commit(*save_of_second)
    assert files.steps(str(tmp_path)) == (1,)


def test_a_temporary_of_an_earlier_version_goes_once_it_has_lapsed(tmp_path: Path) -> None:
    left = tmp_path / "3.orbax-checkpoint-tmp"
    left.mkdir()
    (left / claims.FILE).write_text("session/4")
    with pytest.raises(CheckpointError, match="session session saves"):
        save(tmp_path, 5)
    renewed_s = time.time() - LEASE_S - 2
    os.utime(left / claims.FILE, (renewed_s, renewed_s))
    save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


@pytest.mark.parametrize(
    "handler",
    [{}, {"use_zarr3": True}, {"use_ocdbt": False}],
    ids=lambda how: next(iter(how), "default"),
)
def test_what_others_write_with_orbax_is_read(tmp_path: Path, handler: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**handler)) as checkpointer:
        state = {"layers": [jax.numpy.asarray(W), {"n": 3}], "name": "a string", "nothing": None}
        checkpointer.save(tmp_path / "5", args=ocp.args.PyTreeSave(state))
    result = files.contents(str(tmp_path), 5)
    assert result.arrays["layers.0"] == files.StoredType(element_type="f32", shape=(4, 6))
    assert [leaf.name for leaf in trees.leaves_of(result.tree)] == ["layers.0", "layers.1.n", "name"]
    (box,) = files.read(str(tmp_path), 5, [("layers.0", (slice(0, 4), slice(2, 3)))])
    np.testing.assert_array_equal(box, W[:, 2:3])
