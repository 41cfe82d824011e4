"""Every `python` and `sh` block of the documents runs, or says why it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.snippets.blocks import DOCUMENTS, ROOT, blocks_of, name_of

_THAT_RUN = [document for document in DOCUMENTS if any(not block.reason for block in blocks_of(document))]

#: The blocks that no test runs: how many of each page, and why.
NOT_RUN = {
    "CONTRIBUTING.md": ["builds the environment and runs the whole suite"],
    "README.md": ["minutes long", "a minute of planning", "servers that run until they are stopped"],
    "docs/debugging-a-plan.md": ["refused on purpose"],
    "docs/keras.md": ["downloads Keras", *4 * ["needs Keras"]],
    "docs/options.md": ["needs a server that ends"],
    "docs/run.md": ["needs other hosts", "needs other hosts"],
    "docs/tensorflow.md": ["downloads TensorFlow", *2 * ["needs TensorFlow"]],
    "docs/torch.md": ["downloads PyTorch", *3 * ["needs PyTorch"]],
    "docs/from-horovod.md": ["needs the launcher", "needs the launcher", "needs other hosts"],
    "examples/README.md": ["a minute of planning", "servers that run until they are stopped"],
    "examples/gpt2/README.md": ["minutes of training"],
    "examples/moe/README.md": ["minutes of training"],
    "examples/wide_resnet/README.md": ["minutes of training"],
}


def test_blocks_that_do_not_run_are_known() -> None:
    reasons = {name_of(page): [block.reason for block in blocks_of(page) if block.reason] for page in DOCUMENTS}
    assert {name: found for name, found in reasons.items() if found} == NOT_RUN


@pytest.mark.slow
@pytest.mark.parametrize("document", _THAT_RUN, ids=name_of)
def test_blocks_run(document: Path, tmp_path: Path) -> None:
    for name in ("examples", "cluster_configs", "shardwright", "launch_worker.sh"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "tests.snippets.run", str(document)]
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "SHARDWRIGHT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
