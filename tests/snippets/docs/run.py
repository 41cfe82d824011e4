"""docs/run.md: a program and a module in the current folder."""

import sys
from pathlib import Path

Path("train.py").write_text(
    "import os\n"
    "rank, size, local = (os.environ[f'SHARDWRIGHT_{name}'] for name in ('RANK', 'SIZE', 'LOCAL_RANK'))\n"
    "print(f'rank {rank} of {size}, local rank {local}')\n"
)
Path("training.py").write_text("def evaluate(name):\n    return 0.5\n")
sys.path.insert(0, str(Path.cwd()))
