"""Values shared by several commands: meshes, forced shardings, clusters."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options.plan_options import (
    CONSTRAINTS,
    EFFORTS,
    FORCED_STRATEGIES,
    FUSED_ATTENTIONS,
    MODES,
    OFFLOADS,
    REMATS,
    REPLICATED,
    RESTS,
    REWRITES,
    Pin,
    PlanOptions,
    TensorPins,
)
from shardwright.options.user_options import OPTION_HELP
from shardwright.spelling import did_you_mean

if TYPE_CHECKING:
    from shardwright.builders.base import Builder

#: Strategy builders by name; others, and their arguments, take a script.
BUILDERS = (
    "AllReduce", "Auto", "PS", "PSLoadBalancing", "Parallax", "PartitionedAR", "PartitionedPS",
    "RandomAxisPartitionAR", "UnevenPartitionedPS",
)  # fmt: skip


def add_planning_options(parser: argparse.ArgumentParser) -> None:
    """The options of a plan, the same wherever one is made."""
    parser.add_argument(
        "--mesh",
        metavar="SIZES",
        help="mesh to plan for: 8, 2x4, 2x2x2, or data=2,model=4 (default: the planner compares the possible ones)",
    )
    parser.add_argument(
        "--from",
        dest="plan",
        metavar="PLAN.json",
        help="a plan found before, to run instead of a search: as it is for the same program, with its decisions taken "
        "over where they fit for a changed one",
    )
    parser.add_argument(
        "--force",
        metavar="HOW",
        action="append",
        default=[],
        help=f"a strategy ({', '.join(FORCED_STRATEGIES)}), a builder ({', '.join(BUILDERS)}), a plan's JSON file for "
        "the strategies in it, or pins of one argument, NAME=DIM:AXIS,… "
        f"where AXIS may be - (not split) or * (split somewhere), or NAME={REPLICATED}; may repeat for pins",
    )
    kinds: dict[str, dict[str, Any]] = {
        "rest": {"choices": RESTS},
        "bucket": {"metavar": "AMOUNT"},
        "memory_budget": {"metavar": "AMOUNT"},
        "deadline": {"metavar": "SECONDS", "type": float},
        "effort": {"choices": EFFORTS},
        "stages": {"metavar": "S", "type": int},
        "schedule": {"metavar": "NAME"},
        "imbalance": {"metavar": "PART", "type": float},
        "micro_batches": {"metavar": "M", "type": int},
        "micro_batch_inexact": {"action": "store_true"},
        "mode": {"choices": MODES},
        "simple": {"action": argparse.BooleanOptionalAction},
        "rewrites": {"choices": REWRITES},
        "remat": {"choices": REMATS},
        "fused_attention": {"choices": FUSED_ATTENTIONS},
        "expert_capacity": {"metavar": "SHARE", "type": float},
        "offload": {"choices": OFFLOADS},
        "constraints": {"choices": CONSTRAINTS},
    }
    for name, kind in kinds.items():
        help_text = OPTION_HELP[name].replace("%", "%%").replace("`", "")
        parser.add_argument(f"--{name.replace('_', '-')}", help=help_text, **kind)


def add_cluster_option(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--cluster",
        metavar="FILE|N",
        required=required,
        help="cluster file, or a number of CPU devices on one machine",
    )


def cluster_of(text: str, *, for_planning: bool = False) -> Cluster:
    """A cluster by file name or by device count. for_planning: see `Cluster.load`.

    Raises ClusterConfigError or OptionError.
    """
    if re.fullmatch(r"-?\d+(\.\d*)?", text) and not re.fullmatch(r"0*[1-9]\d*", text):
        remedy = "give a whole number from 1, or a cluster file"
        raise OptionError(f"{text} is no number of devices", where="--cluster", remedy=remedy)
    is_count = re.fullmatch(r"\d+", text)
    return Cluster.local(int(text)) if is_count else Cluster.load(Path(text), for_planning=for_planning)


def planning_options(arguments: argparse.Namespace) -> tuple[Builder | None, PlanOptions]:
    """The options collected by `add_planning_options`, and the strategy builder among them. Raises OptionError."""
    from shardwright.builders.choices import read_options  # with the parser of HLO, which few commands need

    options: Any = {name: getattr(arguments, name, None) for name in OPTION_HELP}
    return read_options(options | {"mesh": mesh_of(arguments.mesh), "force": force_of(arguments.force)})


def mesh_of(text: str | None) -> str | dict[str, int] | None:
    """`data=2,model=4` → {"data": 2, "model": 4}; sizes alone (`2x4`) are kept. Raises OptionError."""
    if text is None or "=" not in text:
        return text
    pairs = re.findall(r"([^=,]+)=(\d+)(?:,|$)", text)
    mesh = {name: int(size) for name, size in pairs}
    if ",".join(f"{name}={size}" for name, size in mesh.items()) != text:
        raise OptionError(f"{text!r} is no mesh", where="--mesh", remedy="write 8, 2x4 or data=2,model=4")
    return mesh


def force_of(texts: Sequence[str]) -> str | dict[str, TensorPins] | Builder | None:
    """The option `force`: a strategy name, a builder, strategies of a plan's file, or pins by argument name.

    Raises OptionError.
    """
    if not texts:
        return None
    if len(texts) == 1 and texts[0] in FORCED_STRATEGIES:
        return texts[0]
    if len(texts) == 1 and texts[0] in BUILDERS:
        from shardwright import builders

        builder: Builder = getattr(builders, texts[0])()
        return builder
    if len(texts) == 1 and texts[0].endswith(".json"):
        from shardwright.builders.given import load

        return load(texts[0])
    return dict(_argument_pins(text) for text in texts)


def _argument_pins(text: str) -> tuple[str, TensorPins]:
    name, _, pins = text.rpartition("=")
    if name and pins == REPLICATED:
        return name, REPLICATED
    items = [re.fullmatch(r"(\d+):([A-Za-z_]\w*|-|\*)", item) for item in pins.split(",")]
    if not name or not all(items):
        raise OptionError(
            f"{text!r} is neither a strategy nor the pins of an argument",
            where="--force",
            remedy=did_you_mean(text, (*FORCED_STRATEGIES, *BUILDERS))
            or f"write one of {', '.join((*FORCED_STRATEGIES, *BUILDERS))}, a plan's file, or "
            "\"params['w']=0:data,1:-\"",
        )
    axes: dict[str, Pin] = {"-": None, "*": True}
    return name, {int(item[1]): axes.get(item[2], item[2]) for item in items if item}
