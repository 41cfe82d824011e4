"""Run as every rank: one fails in the way that the argument names, the others wait in a collective."""

from __future__ import annotations

import os
import sys

import numpy as np

from shardwright import ranks
from shardwright.errors import RankLostError


def main() -> None:
    ranks.init(timeout_s=60)
    ranks.barrier()
    if ranks.rank() == 1:
        if sys.argv[1] == "raise":
            raise ValueError("a bug in the script")
        if sys.argv[1] == "exit":
            sys.exit(3)
        os.kill(os.getpid(), 9)
    try:
        ranks.allreduce(np.ones(5, "f"))
    except RankLostError as error:
        print("lost:", error, flush=True)
        os._exit(5)
    print("went on", flush=True)


if __name__ == "__main__":
    main()
