"""The module on the workers, which is the page's first block, and its data."""

from pathlib import Path

import numpy as np

from tests.snippets.blocks import ROOT, blocks_of

Path("my_data.py").write_text(blocks_of(ROOT / "docs" / "datasets.md")[0].text)
TOKENS = str(Path("tokens.npy").resolve())
np.save(TOKENS, np.random.default_rng(0).integers(0, 256, size=10_000, dtype=np.uint8))
