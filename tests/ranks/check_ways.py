"""Run as each of three ranks: the last goes another way than the others, as the argument names it."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from shardwright import ranks


@ranks.jit
def compute(x):
    return ranks.allreduce(x, "sum")


def main() -> None:
    way = sys.argv[1]
    if way == "init" and os.environ["SHARDWRIGHT_RANK"] == "2":
        time.sleep(1000)
    ranks.init(timeout_s=60)
    is_last = ranks.rank() == 2
    if way == "set":
        start_s = time.monotonic()
        if is_last:
            time.sleep(8)
        else:
            ranks.allgather(np.ones(2), process_set=ranks.ProcessSet([0, 1]))
        print("seconds", time.monotonic() - start_s, flush=True)
        return
    if not is_last:
        ranks.barrier()
    elif way == "shutdown":
        ranks.shutdown()
    else:
        print(compute(np.float32(1)), flush=True)


if __name__ == "__main__":
    main()
