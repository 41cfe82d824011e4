"""A bit that has changed in a checkpoint: an error that names the file and an array, or the numbers that were saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from shardwright.checkpoints import trees
from shardwright.cli import app
from shardwright.errors import CheckpointError
from shardwright.server.runtime.checkpoints import checksums, claims, damage, files

LARGE = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)  # 1 MB
VALUES = {"large": LARGE, "half": LARGE.astype(np.float16) * 2, "step": np.asarray(7, np.int32), "w0": LARGE[:3, :5]}
TREE = trees.Node(
    kind="dict",
    children=(*((name, trees.Leaf(name=name)) for name in VALUES), ("nothing", trees.Node(kind="none"))),
)
#: Boxes of another sharding than that of the save: none is a whole chunk, all together are the whole.
QUARTERS = [(slice(top, top + 64), slice(left, left + 512)) for top in range(0, 256, 64) for left in (0, 512)]


def save(directory: Path, step: int = 1) -> None:
    parts = {}
    for name, value in VALUES.items():
        rows = value.shape[0] // 2 if value.ndim and value.shape[0] % 2 == 0 else None
        chunk = (rows, *value.shape[1:]) if rows else value.shape
        boxes = [(slice(at, at + rows), slice(0, value.shape[1])) for at in (0, rows)] if rows else None
        whole = tuple(slice(0, size) for size in value.shape)
        blocks = tuple((box, value[box]) for box in boxes) if boxes else ((whole, value),)
        parts[name] = files.ArrayPart(shape=value.shape, chunk=chunk, blocks=blocks)
    files.begin(str(directory), step, "one/1")
    files.write(str(directory), step, "one/1", TREE, parts)
    files.commit(str(directory), step, "one/1")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good")
    save(directory)
    return directory


def restored(directory: Path) -> dict[str, np.ndarray]:
    """All arrays, as workers of another number than those that saved read them."""
    step = max(files.steps(str(directory)))
    contents = files.contents(str(directory), step)
    assert contents.tree == TREE
    values = {name: np.zeros(stored.shape, VALUES[name].dtype) for name, stored in contents.arrays.items()}
    boxes = [(name, box) for name in ("large", "half") for box in QUARTERS]
    boxes += [(name, tuple(slice(0, size) for size in VALUES[name].shape)) for name in ("step", "w0")]
    for (name, box), value in zip(boxes, files.read(str(directory), step, boxes), strict=True):
        values[name][box] = value
    return values


def flips(directory: Path, count: int) -> Iterator[tuple[Path, int]]:
    """Of every file of a checkpoint some bits."""
    random = np.random.default_rng(1)
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        for bit in random.integers(0, file.stat().st_size * 8, count):
            yield file.relative_to(directory), int(bit)


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def outcome(directory: Path, file: Path) -> str:
    """Raises AssertionError on wrong values, or an error that does not say which file and array."""
    try:
        values = restored(directory)
    except CheckpointError as caught:
        values, error = None, caught
    if values is None:
        assert str(file) in str(error), (file, error)
        assert any(repr(name) in str(error) for name in VALUES), (file, error)
        assert error.remedy
        return "refused"
    for name, value in VALUES.items():
        assert values[name].dtype == value.dtype
        np.testing.assert_array_equal(values[name], value, err_msg=f"{name} after damage to {file}")
    return "right"


def try_flips(good: Path, tmp_path: Path, count: int) -> list[str]:
    outcomes = []
    for file, bit in flips(good, count):
        shutil.copytree(good, tmp_path / "1", dirs_exist_ok=True)
        flip(tmp_path / "1" / file, bit)
        outcomes.append(outcome(tmp_path / "1", file))
    return outcomes


def test_a_flipped_bit_of_any_file_is_seen_or_not_needed(good: Path, tmp_path: Path) -> None:
    outcomes = try_flips(good, tmp_path, 1)
    assert len(outcomes) >= 10
    assert {"refused", "right"} == set(outcomes)


@pytest.mark.dear
def test_two_hundred_flipped_bits(good: Path, tmp_path: Path) -> None:
    outcomes = try_flips(good, tmp_path, 17)
    assert len(outcomes) >= 200
    assert outcomes.count("refused") > 50


def data_file(directory: Path) -> Path:
    """The file that holds the large arrays."""
    return max((path for path in directory.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("at", [0.05, 0.5, 0.95])
def test_damage_to_one_array_leaves_the_others(good: Path, tmp_path: Path, at: float) -> None:
    """A partial restore reads what is whole; part of a damaged chunk is refused with it."""
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    file = data_file(tmp_path)
    flip(file, int(file.stat().st_size * at) * 8 + 3)
    (value,) = files.read(str(tmp_path), 1, [("w0", (slice(1, 2), slice(0, 5)))])
    np.testing.assert_array_equal(value, VALUES["w0"][1:2])
    refusals: dict[str, CheckpointError] = {}
    for name in ("large", "half"):
        try:
            (value,) = files.read(str(tmp_path), 1, [(name, (slice(0, 256), slice(3, 4)))])
        except CheckpointError as error:
            refusals[name] = error
        else:
            np.testing.assert_array_equal(value, VALUES[name][:, 3:4])
    ((name, refusal),) = refusals.items()
    assert f"array {name!r} is damaged" in refusal.message
    assert refusal.where == str(file)


def test_a_damaged_time_hides_no_checkpoint(good: Path, tmp_path: Path) -> None:
    """Else training would begin anew, or from an older one, without a word."""
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    for contents in (b"[", b"{}", b'{"commit_timestamp_nsecs": null}'):
        (tmp_path / "1" / "_CHECKPOINT_METADATA").write_bytes(contents)
        assert files.steps(str(tmp_path)) == (1,)
        assert files.contents(str(tmp_path), 1).saved_at is None
        np.testing.assert_array_equal(restored(tmp_path)["large"], LARGE)


def test_a_damaged_claim_keeps_nobody_out(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    for contents in (b"\xff\xfe", b"", b"{", b"[]", b'{"token": 3}'):
        (tmp_path / "1" / claims.FILE).write_bytes(contents)
        assert files.steps(str(tmp_path)) == (1,)
        claim = claims.read(tmp_path / "1")
        assert claim is not None
        assert isinstance(claim.token, str)


def test_a_checkpoint_without_checksums_is_read_and_says_so(good: Path, tmp_path: Path) -> None:
    assert files.contents(str(good), 1).has_checksums
    shutil.copytree(good, tmp_path / "mine")
    (tmp_path / "mine" / "1" / checksums.FILE).unlink()
    assert not files.contents(str(tmp_path / "mine"), 1).has_checksums
    assert outcome(tmp_path / "mine", Path("1")) == "right"
    with ocp.CheckpointManager(tmp_path / "plain") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": LARGE}))
    assert not files.contents(str(tmp_path / "plain"), 3).has_checksums


def test_a_listing_shows_the_others_beside_a_damaged_one(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    save(tmp_path, 2)
    flip(tmp_path / "1" / "default" / "_METADATA", 100)
    assert app.main(["checkpoints", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "damaged" in text
    assert "default/_METADATA" in text
    assert app.main(["checkpoints", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert "'large'" in first["error"]["message"]
    assert second["has_checksums"]


def test_the_file_of_a_value_is_found_in_a_deep_tree(tmp_path: Path) -> None:
    base = f"file://{tmp_path}/"
    config = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 1}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    with ts.Transaction() as transaction:
        for number in range(60):
            store.with_transaction(transaction)[f"params.layer{number}.w/c/0/0"] = b"value %d" % number
    error: Any = ValueError('DATA_LOSS: Error reading "params.layer41.w/c/0/0" in OCDBT database: Digest mismatch')
    raised = damage.of_arrays(tmp_path, 1, {"params.layer41.w": error}, base)
    assert b"value 41" in Path(raised.where).read_bytes()
