"""`run(function, np=…)`: results in the order of ranks, errors with their traceback, nothing pickled."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shardwright.errors import LaunchError, OptionError
from shardwright.launch import run
from tests.launch import rank_functions
from tests.launch.jobs import launched_program


@pytest.mark.cluster
def test_results_come_in_the_order_of_ranks() -> None:
    results = run(rank_functions.place, ("hello",), {"scale": 0.5}, np=3)
    assert results == [("hello", 0, 0.5), ("hello", 1, 0.5), ("hello", 2, 0.5)]


@pytest.mark.cluster
def test_methods_of_classes_are_found() -> None:
    assert run(rank_functions.Trainer.fit) == ["fitted"]
    assert run(rank_functions.Trainer.name) == ["Trainer"]


@pytest.mark.cluster
def test_a_rank_without_a_result_is_an_error() -> None:
    with pytest.raises(LaunchError, match="rank 0 ended without returning"):
        run(rank_functions.vanish)


@pytest.mark.cluster
def test_ctrl_c_ends_the_ranks() -> None:
    text = "from shardwright.launch import run\nfrom tests.launch.rank_functions import stubborn\nrun(stubborn, np=2)"
    with launched_program(sys.executable, "-c", text) as job:
        for _ in range(2):
            job.wait_for_line("ready")
        job.process.send_signal(signal.SIGINT)
        code, _, err = job.result(10.0)
        assert job.processes() == []
    assert (code, err.rstrip().endswith("KeyboardInterrupt")) == (-signal.SIGINT, True)


@pytest.mark.cluster
def test_arrays_come_back_whole() -> None:
    results = run(rank_functions.rows, (3,), np=2)
    np.testing.assert_array_equal(np.stack(results), np.broadcast_to(np.float32([[[0]], [[1]]]), (2, 3, 2)))
    assert results[1].dtype == np.float32


@pytest.mark.cluster
def test_the_first_failure_is_raised_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 raised") as raised:
        run(rank_functions.fail_on_one, np=2)
    assert "rank_functions.py" in raised.value.message
    assert raised.value.message.endswith("ValueError: of rank one")
    assert "[1]<stderr>:ValueError: of rank one" in capfd.readouterr().err
    assert time.monotonic() - start < 20


@pytest.mark.cluster
def test_a_function_that_leaves_its_process_is_an_error() -> None:
    with pytest.raises(LaunchError, match="SystemExit: 5"):
        run(rank_functions.leave)


@pytest.mark.cluster
def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"result\['value'\]: a builtins.object cannot be sent"):
        run(rank_functions.result_that_cannot_travel)


def local_function() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda: None, "is a lambda"),
        (local_function(), "is a function within a function"),
        (functools.partial(rank_functions.place, "x"), "is no function with a name"),
        (rank_functions.Trainer().method, "is not this function"),
    ],
)
def test_what_another_process_cannot_import_is_refused(function: Callable[..., Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        run(function)


def test_arguments_that_cannot_travel_are_refused() -> None:
    with pytest.raises(OptionError, match=r"a builtins\.object cannot be sent") as raised:
        run(rank_functions.give_back, ([1, object()],))
    assert raised.value.where == "run['args'][0][1]"


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_bad_number_of_ranks_is_refused(size: Any) -> None:
    with pytest.raises(OptionError, match="np="):
        run(rank_functions.place, ("x",), np=size)


def test_values_keep_their_types_and_arrays_their_bits() -> None:
    value = {"a": (1,), 2: "b", (3, 4): None, "tuple": [1], "array": {0.1, -(2**70)}}
    (back,) = run(rank_functions.give_back, (value,))
    assert back == value
    for array in (np.array([1.5, -0.0, np.nan], ml_dtypes.bfloat16), np.float64(1.5), np.array(["a", "bc"])):
        (back,) = run(rank_functions.give_back, (array,))
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(OptionError, match="an array of Python objects"):
        run(rank_functions.give_back, (np.array([object()]),))


SCRIPT = """\
import os
from shardwright.launch import run

def train(factor):
    return factor * int(os.environ["SHARDWRIGHT_RANK"])

if __name__ == "__main__":
    print(run(train, (10,), np=2))
"""


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["script", "module"])
def test_a_function_of_the_script_itself(how: str, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(SCRIPT)
    words = ["training.py"] if how == "script" else ["-m", "training"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[0, 10]\n", "")


def test_a_function_typed_into_a_shell_is_refused() -> None:
    text = "from shardwright.launch.functions import run\ndef f(): pass\nrun(f)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert "f is defined in a notebook or shell" in done.stderr
