"""Run as every rank: the last never calls what the others wait in, or calls it late."""

from __future__ import annotations

import sys
import time

import numpy as np

from shardwright import ranks


def main() -> None:
    late_s = float(sys.argv[1])
    ranks.init(timeout_s=60)
    evens = ranks.ProcessSet([0, 1])
    if evens.included():
        ranks.barrier(evens)  # counted by itself: the last rank is not asked
    ranks.barrier()
    if ranks.rank() == ranks.size() - 1:
        time.sleep(late_s)
    ranks.allreduce(np.ones(3, "f"), name="gradients")
    print("went on", flush=True)


if __name__ == "__main__":
    main()
