"""Ten models under a mesh of Explicit axes beside the same under Auto axes, without and with their author's shardings.

    python -m benchmarks.planner.explicit_models [NAME …] [--run]

A row a model: whether the programs are the same but for source lines, and the predicted step (µs) of their plans for 8
CPU devices; the same with the author's shardings, as `out_sharding=` under Explicit axes and as constraints under Auto
ones, and how many `Sharding` calls they leave. --run: the losses of both plans and of the one with shardings on 8
devices here, less that of one device.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import jax
from jax.sharding import AxisType

import shardwright as sw
from workloads.explicit_models import MODELS, Pins

KINDS = AxisType.Auto, AxisType.Explicit
_LINES = re.compile(r", metadata=\{[^}]*\}")
SHARDING_CALL = 'custom_call_target="Sharding"'


def lower(name: str, kind: AxisType, form: str) -> str:
    """The program's text as the client makes it under a mesh of such axes."""
    step, arguments = MODELS[name](Pins(form))
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))):
        return sw.lower(step, *arguments, donate_argnums=0).hlo_text


def without_lines(text: str) -> str:
    """The program without its source lines."""
    tables = text.index("\nStackFrames\n")
    return _LINES.sub("", text[text.index("\n\n", tables) :])


def predict_us(text: str) -> float:
    plan = sw.plan(text, 8, cache=False)
    assert isinstance(plan, sw.Plan)
    return plan.cost.step_s * 1e6


def compare(name: str, forms: tuple[str, str]) -> str:
    """Whether the programs under Auto and under Explicit axes are the same, and what their plans take."""
    auto, explicit = (lower(name, kind, form) for kind, form in zip(KINDS, forms, strict=True))
    calls = explicit.count(SHARDING_CALL)
    if without_lines(auto) == without_lines(explicit):
        return f"same {predict_us(explicit):8.1f} {calls:3d}"
    return f"{predict_us(auto):8.1f} {predict_us(explicit):8.1f} {calls:3d}"


def run(session: sw.Session, name: str, kind: AxisType, form: str) -> float:
    """The loss of one step on the servers."""
    step, arguments = MODELS[name](Pins(form))
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))):
        loss, _ = session.parallelize(step)(*arguments)
        return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME")
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    session: Any = sw.connect(devices=8) if options.run else None
    print("model     program, step (µs), Sharding calls; with shardings; losses less one device's")
    for name in options.names or MODELS:
        row = f"{name:8s}  {compare(name, ('', ''))}   {compare(name, ('auto', 'explicit'))}"
        if session is not None:
            step, arguments = MODELS[name](Pins())
            alone = float(jax.jit(step)(*arguments)[0])
            forms = (AxisType.Auto, ""), (AxisType.Explicit, ""), (AxisType.Explicit, "explicit")
            row += "   " + ", ".join(f"{run(session, name, *form) - alone:.1e}" for form in forms)
        print(row, flush=True)
    if session is not None:
        session.close()


if __name__ == "__main__":
    main()
