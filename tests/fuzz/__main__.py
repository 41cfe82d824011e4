"""Mutation fuzzing of the readers: `python -m tests.fuzz [NAME …] [--count 20000] [--seed 0]`.

Breaks valid documents and reads what comes out. Each is read, or refused by a typed error with its place. Any other
exception, and a text that takes longer than one of its size may, is a defect: it is kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.readers import READERS, Reader


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", choices=[*READERS, []], help="default: all of them")
    parser.add_argument("--count", type=int, default=20_000, help="texts for each reader")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    names = options.readers or list(READERS)
    return max([_fuzz(READERS[name], options.count, options.seed, folder) for name in names])


def _fuzz(reader: Reader, count: int, seed: int, folder: Path) -> int:
    rng = random.Random(seed)
    documents = reader.documents()
    defects: Counter[str] = Counter()
    count = max(1, round(count * reader.share))
    for number in range(count):
        text = reader.mutate(rng, documents)
        problem = reader.check(text)
        if problem is None:
            continue
        kind = "\n".join(problem.strip().splitlines()[-4:])
        defects[kind] += 1
        if defects[kind] == 1:
            path = folder / f"{reader.name}-{number}.txt"
            path.write_text(text, errors="surrogatepass")
            print(f"{path}:\n{kind[:600]}\n", flush=True)
    print(f"{reader.name}: {count} mutated texts, {sum(defects.values())} neither read nor refused with a place")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
