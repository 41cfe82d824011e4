"""Which folders of a directory are checkpoints, which are temporaries of ours, and which are neither.

| what                                                                    | is                                |
|-------------------------------------------------------------------------|-----------------------------------|
| `STEP`, with Orbax's `_CHECKPOINT_METADATA` and a mark of its commit    | a checkpoint                      |
| a checkpoint with the structure of a save of ours, nothing added to it  | ours, and may be pruned           |
| `STEP.orbax-checkpoint-tmp-shardwright-…`, or a temporary with a claim  | a temporary of ours               |
| all else: files, links, other numbers, temporaries of others            | never touched                     |

A mark of the commit is `commit_success.txt`, or the time of the commit in the metadata (all that earlier versions of
Orbax left where a rename commits), or our checksums, so that a checkpoint whose metadata is damaged is one, and said to
be damaged, where it would else be passed over. Paths are `epath.Path`s: directories of this machine, or of a store.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from shardwright.checkpoints.directories import MAX_STEP
from shardwright.errors import CheckpointError
from shardwright.server.runtime.checkpoints import checksums, claims

#: Orbax's name of the only item of a checkpoint.
ITEM = "default"
#: The key of our structure in the metadata of the item.
STRUCTURE = "shardwright_tree"
#: Metadata of a checkpoint.
STEP_METADATA = "_CHECKPOINT_METADATA"

_TEMPORARY = ocp.path.atomicity.TMP_DIR_SUFFIX
_OWN_TEMPORARY = f"{_TEMPORARY}-shardwright-"
_COMMITTED = ocp.path.atomicity.COMMIT_SUCCESS_FILE


def children(directory: str) -> list[Any]:
    """The entries of a directory; empty if it does not exist. Raises CheckpointError if it is a file."""
    folder = epath.Path(directory)
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise CheckpointError("it is a file, not a directory", where=directory, remedy="name a directory")
    return sorted(folder.iterdir())


def checkpoints(directory: str) -> dict[int, Any]:
    """The complete checkpoints by number, ascending."""
    if not children(directory):
        return {}
    numbered = ocp.path.step.standard_name_format().find_all(epath.Path(directory))
    complete = {
        item.step: item.path
        for item in numbered
        if item.path.name == str(item.step) and item.step <= MAX_STEP and _is_marked(item.path)
    }
    return dict(sorted(complete.items()))


def is_complete(folder: Any) -> bool:
    """Whether Orbax completed it."""
    return bool(ocp.path.step.is_path_finalized(folder)) and _is_marked(folder)


def step_metadata(folder: Any) -> dict[str, Any] | None:
    """Orbax's metadata of a whole checkpoint; None without any."""
    return _json_of(folder / STEP_METADATA)


def keep_latest(directory: str, count: int) -> None:
    """Remove those of our checkpoints that `count` later ones of ours follow; each at once or not at all."""
    ours = [folder for folder in checkpoints(directory).values() if _is_ours(folder)]
    for folder in ours[:-count]:
        if not _is_as_written(folder):
            continue
        doomed = temporary_path(directory, int(folder.name), "removed").get()
        if doomed != folder:  # where a rename is atomic
            folder.rename(doomed)
        doomed.rmtree()


def temporary_path(directory: str, step: int, token: str) -> Any:
    """Orbax's temporary path of the save `token`: under a name of its own, where a rename commits."""
    final = epath.Path(directory) / str(step)
    kind = ocp.path.atomicity_defaults.get_default_temporary_path_class(final)
    path = kind.from_final(final)
    if path.get() == final:
        return path
    return kind.from_temporary(final.with_name(f"{step}{_OWN_TEMPORARY}{re.sub(r'[^A-Za-z0-9]+', '-', token)}"))


def read_claims(directory: str) -> dict[Any, claims.Claim]:
    """The claims in the folders of saves, temporary or complete."""
    names = [child for child in children(directory) if child.name.isdecimal() or _TEMPORARY in child.name]
    claim_of_folder = {folder: claims.read(folder) for folder in names if not os.path.islink(folder)}
    return {folder: claim for folder, claim in claim_of_folder.items() if claim is not None}


def remove_leftovers(directory: str, token: str, is_open: claims.IsOpen) -> None:
    """Remove leftovers of our broken saves: temporaries, and claims in checkpoints."""
    claim_of_folder = read_claims(directory)
    for folder in children(directory):
        claim = claim_of_folder.get(folder)
        if claim is not None and claims.is_blocking(folder, claim, token, is_open):
            continue
        if (_OWN_TEMPORARY in folder.name or claim is not None) and ocp.path.step.is_path_temporary(folder):
            folder.rmtree(missing_ok=True)
        elif claim is not None and claim.session_id != claims.session_of(token):
            claims.remove(folder)


def _is_marked(folder: Any) -> bool:
    """Whether it has Orbax's metadata of a checkpoint, and a mark of its commit."""
    if not (folder / STEP_METADATA).exists():
        return False
    if checksums.has_checksums(folder):
        return True
    facts = step_metadata(folder)
    if facts is None:
        return False
    return isinstance(facts.get("commit_timestamp_nsecs"), int) or (folder / _COMMITTED).exists()


def _is_ours(folder: Any) -> bool:
    """Whether a save of ours wrote the checkpoint, here."""
    if os.path.islink(folder):
        return False
    custom = (_json_of(folder / ITEM / checksums.METADATA) or {}).get("custom_metadata")
    return isinstance(custom, dict) and STRUCTURE in custom


def _is_as_written(folder: Any) -> bool:
    """Whether nobody has put anything into the checkpoint."""
    return {child.name for child in folder.iterdir()} <= {ITEM, STEP_METADATA, _COMMITTED, claims.FILE, checksums.FILE}


def _json_of(file: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text()) if file.exists() else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
