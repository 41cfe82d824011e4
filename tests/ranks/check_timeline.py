"""Run as every rank: some collectives, one of them late, on a timeline; argument: its file."""

from __future__ import annotations

import sys
import time

import jax
import numpy as np

from shardwright import ranks


def main() -> None:
    ranks.init(timeout_s=60)
    ranks.start_timeline(sys.argv[1])
    ranks.allreduce(np.ones(5, "f"), name="first")
    if ranks.rank() == 1:
        time.sleep(0.5)
    with ranks.timeline_span("a step"):
        ranks.allreduce(np.ones(50_000, "f"), name="late")
    step = ranks.jit(lambda x: ranks.allreduce(x, "sum"))
    jax.block_until_ready(step(np.ones(3, "f")))
    ranks.stop_timeline()
    ranks.allreduce(np.ones(5, "f"), name="after")
    if len(sys.argv) > 2:  # a second one, ended by the end of the program
        ranks.start_timeline(sys.argv[2])
        ranks.allreduce(np.ones(5, "f"), name="second")


if __name__ == "__main__":
    main()
