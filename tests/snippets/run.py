"""Runs the blocks of one document in the current folder: `python -m tests.snippets.run DOCUMENT`.

Python blocks share one name space, which the page's prelude fills first; shell blocks stop at the first command that
fails. Names in tracebacks are the document's, with its line numbers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.snippets.blocks import Block, blocks_of, prelude_of


def run_python(document: Path) -> None:
    """Runs all its Python blocks, also those that need what is not everywhere. Raises what a block raises."""
    names: dict[str, Any] = {"__name__": "snippets"}
    for block in blocks_of(document):
        if block.language == "python":
            _run_block(document, block, names)


def run(document: Path) -> None:
    """Raises what a block raises, CalledProcessError where a command fails."""
    names: dict[str, Any] = {"__name__": "snippets"}
    prelude = prelude_of(document)
    if prelude.exists():
        exec(compile(prelude.read_text(), str(prelude), "exec"), names)
    for block in blocks_of(document):
        if block.reason:
            continue
        print(f"--- {document}:{block.line}", flush=True)
        if block.language == "python":
            _run_block(document, block, names)
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)


def _run_block(document: Path, block: Block, names: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + block.text, str(document), "exec"), names)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
