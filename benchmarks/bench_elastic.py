"""Seconds until elastic ranks train on: after a kill, after a hang, and once another rank may come.

    python benchmarks/bench_elastic.py [--rounds 3] [--hang-timeout 10] [--only kill]

Real jobs of three ranks on this machine under `shardwright run`, a small step of `sw.ranks.jit`, a commit after each.
Prints one JSON object a round and event: the seconds from the event until

    begin   a new rank's program has its imports (growth only),
    up      the next generation is there, at the last of its ranks,
    step    its first step is done at all of its ranks, compiled anew,

and `pause`: how long no rank finished a step. `kill 0` is rank 0's. A hang's seconds include `--hang-timeout`; growth
counts from the edit of the hosts file. The load is the machine's, of the last minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PATIENCE_S = 120.0
EVENTS = ("kill", "kill 0", "hang", "growth")


@dataclass(frozen=True, slots=True)
class _Line:
    """What a rank says. kind: begin, up or step."""

    kind: str
    at_s: float
    pid: int
    generation: int = -1
    rank: int = -1
    size: int = 0


# ---- a rank ----------------------------------------------------------------------
def run_rank() -> None:
    """Train until the benchmark ends the job."""
    import jax
    import jax.numpy as jnp
    import optax

    from shardwright import ranks

    _say("begin")
    optimizer = optax.adam(1e-3)

    @ranks.jit
    def step(params: dict[str, jax.Array], opt_state: optax.OptState, batch: jax.Array) -> tuple[object, object]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.square(jnp.tanh(batch @ params["a"]) @ params["b"]).mean()

        grads = ranks.allreduce(jax.grad(loss)(params))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    ranks.init()
    params = {"a": jnp.ones((64, 64)), "b": jnp.ones((64, 1))}
    state = ranks.elastic.State(params=params, opt_state=optimizer.init(params))

    @ranks.elastic.run
    def train(state: ranks.elastic.State) -> None:
        place = (ranks.generation(), ranks.rank(), ranks.size())
        _say("up", *place)
        while True:
            state.params, state.opt_state = step(state.params, state.opt_state, jnp.ones((8, 64)))
            state.params["b"].block_until_ready()
            _say("step", *place)
            time.sleep(0.05)
            state.commit()

    train(state)


def _say(kind: str, *place: int) -> None:
    print("at", kind, f"{time.time():.4f}", os.getpid(), *place, flush=True)


# ---- a job -----------------------------------------------------------------------
class _Job:
    """`shardwright run` of three ranks or two; its lines, as they come."""

    def __init__(self, options: list[str]) -> None:
        command = [sys.executable, "-m", "shardwright", "run", *options, sys.executable, __file__, "--as-rank"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(_ROOT)}
        self._process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self.log.append(text)
            words = text.partition(">:")[2].split()
            if len(words) in (4, 7) and words[0] == "at":
                self._lines.put(_Line(words[1], float(words[2]), int(words[3]), *map(int, words[4:])))
        self._lines.put(None)

    def lines(self) -> Iterator[_Line]:
        """Lines as they come. Ends the benchmark where none comes."""
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get(timeout=_PATIENCE_S)) is not None:
                yield line
        raise SystemExit("the job does not go on:\n" + "".join(self.log[-40:]))

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def time_event(event: str, hang_timeout_s: float) -> dict[str, object]:
    """Start a job, let it train, have the event happen, and wait until the next generation trains."""
    size = 2 if event == "growth" else 3
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder, "hosts")
        hosts.write_text(f"localhost slots={size}\n")
        options = ["--min-np", "2", "--max-np", "3", "--hosts-file", str(hosts), "--host-failures", "9"]
        job = _Job([*options, "--hang-timeout", f"{hang_timeout_s:g}"])
        try:
            return {"event": event, **_time(job, event, size, hosts), "load": round(os.getloadavg()[0], 1)}
        finally:
            job.close()


def _time(job: _Job, event: str, size: int, hosts: Path) -> dict[str, float]:
    lines, steps, pids = job.lines(), 0, {}
    last_step_s = 0.0
    for line in lines:
        if line.kind == "step" and line.size == size:
            pids[line.rank], steps, last_step_s = line.pid, steps + 1, line.at_s
        if steps >= 10 * size:
            break
    event_s = time.time()
    if event == "growth":
        hosts.write_text("localhost slots=3\n")
    else:
        os.kill(pids[0 if event == "kill 0" else 2], signal.SIGSTOP if event == "hang" else signal.SIGKILL)
    expected = 3 if event == "growth" else 2
    seen: dict[str, float] = {}
    up: set[int] = set()
    stepped: set[int] = set()
    for line in lines:
        if line.kind == "begin" and line.pid not in pids.values():
            seen.setdefault("begin", line.at_s)
        elif line.kind == "step" and line.generation == 0:
            last_step_s = max(last_step_s, line.at_s)
        elif line.generation == 1 and line.size == expected:
            seen[line.kind] = line.at_s
            (up if line.kind == "up" else stepped).add(line.rank)
            if len(stepped) == expected:
                break
    if event != "growth":
        seen.pop("begin", None)
    figures = {kind: round(at_s - event_s, 2) for kind, at_s in seen.items()}
    return {**figures, "pause": round(seen["step"] - last_step_s, 2)}


def main() -> None:
    """Time the events; with `--as-rank` be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--hang-timeout", type=float, default=10.0, help="of shardwright run (10)")
    parser.add_argument("--only", choices=EVENTS, help="one event")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        run_rank()
        return
    for _ in range(arguments.rounds):
        for event in [arguments.only] if arguments.only else EVENTS:
            print(json.dumps(time_event(event, arguments.hang_timeout)), flush=True)


if __name__ == "__main__":
    main()
