"""Work in forked children: its result, its errors, its end. Run in processes of their own: this one has threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="nothing is forked on one core, or elsewhere"
)

ROOT = Path(__file__).resolve().parent.parent.parent

PRELUDE = """
import os, signal, sys, threading, time
import numpy
from shardwright.planner import parallel
from shardwright.planner.parallel import ForkedFuture

me = os.getpid()

def children():
    return [int(pid) for pid in open(f"/proc/{me}/task/{me}/children").read().split()]

def where(begun):
    return "here" if begun.result() == me else "elsewhere"
"""


#: Plans the program on stdin and prints the plan, in how many processes, and how a killed child changes it.
PLANS = """
import json, resource
from dataclasses import replace
from shardwright.clusters.cluster import Cluster
from shardwright.planner import plan
from shardwright.plans.plan_text import plan_to_json

forks = []
if "alone" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
fork = os.fork
def counted():
    forks.append(fork())
    if forks[-1] and "killing" in sys.argv:
        os.kill(forks[-1], signal.SIGKILL)
    return forks[-1]
os.fork = counted
made = plan(sys.stdin.read(), replace(Cluster.local(8), hardware="a100"))
print(len(forks))
print(plan_to_json(replace(made, planning_s=0.0)))
"""


def run(body: str, *arguments: str, stdin: str = "") -> str:
    """What a script prints; it must leave no child behind."""
    script = PRELUDE + textwrap.dedent(body) + "\nassert not children(), children()\n"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_work_is_done_in_a_child() -> None:
    assert run("print(where(ForkedFuture(os.getpid)))") == "elsewhere"


def test_a_result_larger_than_a_pipe_comes_whole() -> None:
    assert run("print(sum(ForkedFuture(lambda: numpy.arange(1_000_000)).result()))") == str(sum(range(1_000_000)))


def test_where_a_thread_runs_nothing_is_forked() -> None:
    body = """
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        print(where(ForkedFuture(os.getpid)))
        stop.set()
        thread.join()
    """
    assert run(body) == "here"


def test_threads_that_python_does_not_know_of_are_seen_too() -> None:
    body = """
        import _thread
        lock = _thread.allocate_lock()
        lock.acquire()
        _thread.start_new_thread(lock.acquire, ())
        assert threading.active_count() == 1
        print(where(ForkedFuture(os.getpid)))
        lock.release()
    """
    assert run(body) == "here"


def test_what_a_child_raises_is_raised_where_its_result_is_wanted() -> None:
    body = """
        def refuse():
            raise KeyError(os.getpid())
        begun = ForkedFuture(refuse)
        assert begun.is_forked
        try:
            begun.result()
        except KeyError as error:
            print("here" if error.args == (me,) else "elsewhere")
    """
    assert run(body) == "here"


def test_what_a_killed_child_was_at_is_done_here() -> None:
    body = """
        def work():
            if os.getpid() != me:
                time.sleep(60)
            return os.getpid()
        begun = ForkedFuture(work)
        (child,) = children()
        os.kill(child, signal.SIGKILL)
        print(where(begun))
    """
    assert run(body) == "here"


def test_a_child_that_hangs_is_given_up() -> None:
    body = """
        def work():
            while os.getpid() != me:
                time.sleep(1)
            return os.getpid()
        print(where(ForkedFuture(work, patience_s=0.2)))
    """
    assert run(body) == "here"


def test_a_child_is_ended_where_its_result_is_not_needed() -> None:
    assert run("begun = ForkedFuture(lambda: time.sleep(60)); begun.cancel(); print(children())") == "[]"


@pytest.mark.dear
def test_a_child_dies_with_its_parent() -> None:
    body = """
        begun = ForkedFuture(lambda: time.sleep(600))
        print(*children(), flush=True)
        os.kill(me, signal.SIGKILL)
    """
    script = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    child = Path("/proc") / done.stdout.strip()
    for _ in range(100):
        if not child.exists() or " Z " in (child / "stat").read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{child} still runs")


def layered() -> str:
    """Eight equal layers: a run, whose bound is worked out ahead."""

    def step(ws: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(ws: list[jax.Array]) -> jax.Array:
            h = x
            for w in ws:
                h = h + jnp.tanh(h @ w)
            return jnp.mean(h * h)

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
    lowered = jax.jit(step).lower(weights, jax.ShapeDtypeStruct((1024, 512), jnp.float32))
    return str(lowered.as_text("hlo"))


@pytest.mark.dear
def test_a_plan_is_the_same_with_children_without_and_with_dying_ones() -> None:
    text = layered()
    (with_count, with_plan), (alone_count, alone_plan), (killing_count, killing_plan) = (
        run(PLANS, how, stdin=text).splitlines() for how in ("with", "alone", "killing")
    )
    assert int(with_count) == int(killing_count) > int(alone_count) == 0
    assert with_plan == alone_plan == killing_plan
