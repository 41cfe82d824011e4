"""Time of an eager `allreduce`, by size, beside Horovod's.

    python benchmarks/bench_ranks.py [--size 2] [--bytes 4 1024 ...] [--rounds 3] [--horovod-python PYTHON]

Starts real ranks on this machine. Prints one JSON object a round and system: for each size of a float32 sum the median
and the minimum in µs and the bandwidth in MB/s (2 (n - 1) / n · bytes / minimum), and the same for 100 arrays of 4 KiB
at once. With `--horovod-python`, the interpreter of an environment with horovod[tensorflow], the two take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = (4, 64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
GROUP = (100, 4 << 10)
_ROOT = Path(__file__).parents[1]

_Calls = tuple[int, int, Callable[[Any], Callable[[], Any]], Callable[[Any], Callable[[], Any]], Callable[[], Any]]


def count_repeats(nbytes: int) -> int:
    """Number of timed calls of a size."""
    return 200 if nbytes <= 16 << 10 else 60 if nbytes <= 1 << 20 else 15 if nbytes <= 4 << 20 else 6


def init_shardwright() -> _Calls:
    """Rank, size, a sum of one array, a sum of many, a barrier."""
    from shardwright import ranks

    ranks.init()

    def one(array: Any) -> Callable[[], Any]:
        return lambda: ranks.allreduce(array, "sum", name="x")

    def many(arrays: Any) -> Callable[[], Any]:
        return lambda: ranks.grouped_allreduce(arrays, "sum", name="group")

    return ranks.rank(), ranks.size(), one, many, ranks.barrier


def init_horovod() -> _Calls:
    """The same calls of Horovod with TensorFlow."""
    import horovod.tensorflow as hvd  # type: ignore[import-not-found]
    import tensorflow as tf  # type: ignore[import-not-found]

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()

    def one(array: Any) -> Callable[[], Any]:
        tensor = tf.constant(array)
        return lambda: hvd.allreduce(tensor, op=hvd.Sum, name=f"x{array.size}").numpy()

    def many(arrays: Any) -> Callable[[], Any]:
        tensors = [tf.constant(array) for array in arrays]
        return lambda: [sums.numpy() for sums in hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")]

    return hvd.rank(), hvd.size(), one, many, lambda: hvd.allreduce(tf.constant(0.0), name="barrier")


def time_call(call: Callable[[], Any], barrier: Callable[[], Any], times: int) -> tuple[float, float]:
    """Median and minimum seconds."""
    call()
    call()
    barrier()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    return seconds[len(seconds) // 2], seconds[0]


def run_rank(system: str, sizes: list[int]) -> None:
    """Time all sizes on one rank; rank 0 prints."""
    import numpy as np

    rank, size, one, many, barrier = init_shardwright() if system == "shardwright" else init_horovod()
    rows = {}
    for nbytes in sizes:
        median, minimum = time_call(one(np.ones(nbytes // 4, np.float32)), barrier, count_repeats(nbytes))
        bandwidth = 2 * (size - 1) / size * nbytes / minimum / 1e6
        rows[nbytes] = {
            "median_us": round(median * 1e6),
            "min_us": round(minimum * 1e6),
            "mb_per_s": round(bandwidth, 1),
        }
    count, nbytes = GROUP
    median, minimum = time_call(many([np.ones(nbytes // 4, np.float32) for _ in range(count)]), barrier, 30)
    group = {"median_us": round(median * 1e6), "min_us": round(minimum * 1e6)}
    if rank == 0:
        print(json.dumps({"system": system, "ranks": size, "bytes": rows, f"{count} x {nbytes}": group}), flush=True)


def run_shardwright(size: int, sizes: list[int]) -> str:
    """Run one round of Shardwright's, with the launcher's own parts."""
    from shardwright.launch.hosts import Host, place_ranks
    from shardwright.launch.job import rank_variables
    from shardwright.launch.meeting import MeetingPoint
    from shardwright.launch.service import LOOPBACK, CoordinationService

    command = [sys.executable, __file__, "--as-rank", "shardwright", "--bytes", *map(str, sizes)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(_ROOT)}
    with (
        CoordinationService(LOOPBACK, size) as service,
        MeetingPoint(LOOPBACK, size, first=service) as meeting,
        tempfile.TemporaryFile("w+") as output,
    ):
        children = [
            subprocess.Popen(
                command,
                env={**environment, **rank_variables(place, size, service.address, meeting=meeting.address)},
                stdout=output,
            )
            for place in place_ranks((Host(name="localhost", slots=size),), size)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        output.seek(0)
        return output.read()


def run_horovod(python: str, size: int, sizes: list[int]) -> str:
    """Run one round of Horovod's, by horovodrun over Gloo."""
    horovodrun = str(Path(python).parent / "horovodrun")
    command = [horovodrun, "--gloo", "-np", str(size), python, __file__, "--as-rank", "horovod", "--bytes"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    process = subprocess.run([*command, *map(str, sizes)], env=environment, capture_output=True, text=True, check=True)
    return "".join(line[line.index("{") :] + "\n" for line in process.stdout.splitlines() if '{"system"' in line)


def main() -> None:
    """Start the ranks; with `--as-rank` be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(SIZES), help="bytes of the array")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--horovod-python", help="python of an environment with horovod[tensorflow]")
    parser.add_argument("--as-rank", choices=("shardwright", "horovod"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        run_rank(arguments.as_rank, arguments.bytes)
        return
    for _ in range(arguments.rounds):
        print(run_shardwright(arguments.size, arguments.bytes), end="", flush=True)
        if arguments.horovod_python:
            print(run_horovod(arguments.horovod_python, arguments.size, arguments.bytes), end="", flush=True)


if __name__ == "__main__":
    main()
