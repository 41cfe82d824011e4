"""What an import costs: `import shardwright` and the command line stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("jax", "jaxlib", "pulp", "highspy", "grpc", "numpy", "prometheus_client", "rich")


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after `statement`."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(child.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import shardwright", HEAVY),
        ("import shardwright.cli; shardwright.cli.app.build_parser()", HEAVY),
        ("import shardwright.clusters.cluster", HEAVY),
        ("import shardwright.plans.plan", ("jax", "jaxlib", "pulp", "highspy")),
        ("import shardwright.hlo", ("jax", "jaxlib", "pulp", "highspy")),
        ("import shardwright.launch", HEAVY),
        ("import shardwright.builders.choices", HEAVY),
        ("import shardwright.planner", ("jax", "jaxlib")),
        ("import shardwright.client.step, shardwright.client.session", ("shardwright.client.frontends.jax", "flax")),
        (
            "import shardwright.server.worker.executor, shardwright.server.__main__, shardwright.server.run_node",
            ("jax", "shardwright.hlo", "shardwright.options", "shardwright.tasks"),
        ),
        ("import shardwright.client", ("pulp", "highspy", "shardwright.planner", "shardwright.server")),
    ],
)
def test_import_loads_nothing_heavy(statement: str, absent: tuple[str, ...]) -> None:
    assert modules_after(statement).isdisjoint(absent)
