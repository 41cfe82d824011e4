"""Steps that are measured: their results, how long they took, and the trace of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.xla import canonical_hlo
from tests.report.trace_format import require_valid


def update(w: Any, x: Any) -> Any:
    return w + jnp.tanh(x @ w).sum(0), jnp.sum(x)


def test_a_measured_step_is_a_step(session: sw.Session) -> None:
    step = session.parallelize(update, donate_argnums=0, force="data")
    w, x = np.zeros((8, 8), np.float32), np.ones((16, 8), np.float32)
    (state, total), measured = step.measure(w, x)
    assert measured.run_s > 0
    assert float(total) == 128
    state, _ = step(state, x)
    (state, _), again = step.measure(state, x)
    assert again.run_s > 0
    expected = w
    for _ in range(3):
        expected = expected + np.tanh(x @ expected).sum(0)
    np.testing.assert_allclose(np.asarray(state), expected, rtol=1e-5)


def test_a_trace_shows_what_was_measured_below_what_was_predicted(session: sw.Session, tmp_path: Path) -> None:
    step = session.parallelize(update, donate_argnums=0, force="data")
    path = tmp_path / "step.json"
    state, _ = step.trace(path, np.zeros((8, 8), np.float32), np.ones((16, 8), np.float32))
    assert np.asarray(state).shape == (8, 8)
    trace = json.loads(path.read_text())
    require_valid(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    tracks = {(names[e["pid"]], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert tracks == {(f"{which}: devices", device) for which in ("predicted", "measured") for device in range(8)}
    assert trace["otherData"]["measured_step_s"] > 0


def test_a_dump_shows_the_program_that_the_servers_run(session: sw.Session, tmp_path: Path) -> None:
    step = session.parallelize(update, donate_argnums=0, force="data")
    with pytest.raises(sw.PlanError, match="no plan yet"):
        step.dump(tmp_path)
    step.compile(np.zeros((8, 8), np.float32), np.ones((16, 8), np.float32))
    texts = {path.suffix: path.read_text() for path in step.dump(tmp_path / "new" / "folder")}
    assert "sdy.sharding_constraint" in texts[".mlir"]
    (reduced,) = [each for each in step._require_program().load.collectives if each.kind == "all-reduce"][:1]
    assert f"{reduced.instruction} = " in canonical_hlo(texts[".hlo"])
    (tmp_path / "file").write_text("")
    with pytest.raises(sw.OptionError, match="cannot be written"):
        step.dump(tmp_path / "file")
