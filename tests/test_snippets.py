"""Every `python` and `sh` block of the documents runs, or says why it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright as sw
from tests.snippets.blocks import DOCUMENTS, ROOT, blocks_of, name_of

_THAT_RUN = [document for document in DOCUMENTS if any(not block.reason for block in blocks_of(document))]

#: The blocks that no test runs: how many of each page, and why.
NOT_RUN = {
    "CONTRIBUTING.md": ["builds the environment and runs the whole suite"],
    "README.md": ["minutes long", "a minute of planning", "servers that run until they are stopped"],
    "docs/benchmarks/scaling.md": ["minutes of planning"],
    "docs/changing-plans.md": ["hundreds of steps", "takes minutes"],
    "docs/datasets.md": ["a source of your own"],
    "docs/debugging-a-plan.md": ["refused on purpose", "needs the compilers for GPUs and TPUs"],
    "docs/keras.md": ["downloads Keras", *4 * ["needs Keras"]],
    "docs/mixtures.md": ["minutes of planning and compiling"],
    "docs/operating.md": ["needs root", "needs a cluster"],
    "docs/options.md": ["needs a server that ends"],
    "docs/host-memory.md": ["a fragment of a step"],
    "docs/run.md": ["needs other hosts", "needs other hosts"],
    "docs/tensorflow.md": ["downloads TensorFlow", *2 * ["needs TensorFlow"]],
    "docs/recovery.md": ["servers of a cluster", "needs a server of a cluster"],
    "docs/security.md": ["there is no such server"],
    "docs/torch.md": ["needs PyTorch", "downloads PyTorch", *4 * ["needs PyTorch"]],
    "docs/benchmarks/ranks.md": ["needs an environment with Horovod", "minutes", "minutes"],
    "docs/from-torchrun.md": [*2 * ["needs PyTorch"], "needs torchrun"],
    "docs/from-horovod.md": [*4 * ["needs the launcher"], "needs other hosts"],
    "examples/README.md": ["a minute of planning", "servers that run until they are stopped"],
    "examples/gpt2/README.md": ["minutes of training"],
    "examples/llama/README.md": ["minutes of training"],
    "examples/moe/README.md": ["minutes of training", "minutes of training"],
    "examples/wide_resnet/README.md": ["minutes of training"],
}


def test_blocks_that_do_not_run_are_known() -> None:
    reasons = {name_of(page): [block.reason for block in blocks_of(page) if block.reason] for page in DOCUMENTS}
    assert {name: found for name, found in reasons.items() if found} == NOT_RUN


#: Pages whose programs find one running server. Those of the others start their own, as a new user's do: they save in
#: relative folders, read their own batches, lose workers.
_SERVED = {"docs/changing-plans.md", "docs/from-autodist.md", "docs/options.md", "examples/smoke/README.md"}


#: What a page's programs print besides running: that a smoke test agrees with plain JAX, it says by ending well.
PRINTED = {
    "examples/smoke/README.md": [
        "contracted_matmul: mesh data=8; a [-, data], b [data, -], result [-, -]; all-reduce;",
        "kernel [-, -, -, model]",
        "attention_by_heads: mesh data=2 × model=4;",
    ],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Plans of all pages: several plan the same step."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("cache"))
        patch.setenv("SHARDWRIGHT_CACHE", folder)
        yield folder


@pytest.fixture(scope="module")
def server(cache: str) -> Iterator[dict[str, str]]:
    """The variables by which programs find a server of eight devices."""
    with sw.connect(devices=8) as session:
        host, _, port = session._state.master.address.rpartition(":")
        assert session._state.server is not None
        yield {"SERVER_IP": host, "SERVER_PORT": port, "SHARDWRIGHT_TOKEN": session._state.server.token}


@pytest.mark.dear
@pytest.mark.parametrize("document", _THAT_RUN, ids=name_of)
def test_blocks_run(document: Path, tmp_path: Path, cache: str, server: dict[str, str]) -> None:
    for name in ("examples", "cluster_configs", "shardwright", "launch_worker.sh"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "tests.snippets.run", str(document)]
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "SHARDWRIGHT_CACHE": cache}
    if name_of(document) in _SERVED:
        environment |= server
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [text for text in PRINTED.get(name_of(document), []) if text not in done.stdout] == []
