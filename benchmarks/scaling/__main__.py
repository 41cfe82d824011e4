"""Predicted efficiency of ResNet-101, Inception V3 and VGG-16 on up to 512 P100s, beside Horovod's.

    python -m benchmarks.scaling [--json FILE] [--svg FILE]
    python -m benchmarks.scaling --models VGG-16 --devices 512 --json FILE     (some more, into the same file)
    python -m benchmarks.scaling --json FILE --svg FILE --draw                 (what the file has)

For each model: data parallelism on each number of devices, with all hidden that can run beside compute, and with
nothing; on the most devices with one assumption changed at a time; and the free search there. No device is needed.
docs/benchmarks/scaling.md says what is assumed. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.scaling.picture import Curve, draw
from benchmarks.scaling.predictions import STRATEGIES, Prediction, Predictor
from benchmarks.scaling.published import NODE_DEVICES, NODES, PUBLISHED
from benchmarks.scaling.settings import HEADLINE, SETTINGS

MOST = NODE_DEVICES * NODES
DEVICES = (1, *(NODE_DEVICES << number for number in range(8)))

#: Model → least and most efficiency of data parallelism on 512 devices.
BARS = {"ResNet-101": (0.85, 1.0), "Inception V3": (0.85, 1.0), "VGG-16": (0.63, 0.73)}
PLAN_CPU_S, PLAN_BYTES = 60.0, 2e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(PUBLISHED), help="default: all")
    parser.add_argument("--devices", type=_read_counts, default=DEVICES, help=f"default: {','.join(map(str, DEVICES))}")
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=list(STRATEGIES))
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS", help="of a search (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="read and write predictions")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture")
    parser.add_argument("--draw", action="store_true", help="predict nothing, show what --json has")
    arguments = parser.parse_args()
    if unknown := [model for model in arguments.models if model not in PUBLISHED]:
        parser.error(f"--models: {unknown[0]!r} is none of {', '.join(PUBLISHED)}")
    if unknown := [strategy for strategy in arguments.strategies if strategy not in STRATEGIES]:
        parser.error(f"--strategies: {unknown[0]!r} is none of {', '.join(STRATEGIES)}")
    if arguments.draw and (arguments.json is None or not arguments.json.exists()):
        parser.error("--draw needs a file of predictions in --json")
    found = _read(arguments.json)
    if not arguments.draw:
        for prediction in _predict(arguments.models, arguments.devices, arguments.strategies, arguments.deadline):
            found = [each for each in found if _key(each) != _key(prediction)] + [prediction]
            print(_describe(prediction), file=sys.stderr, flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in (_by_devices(found), _by_setting(found)):
        console.print(table)
    if arguments.svg is not None:
        arguments.svg.write_text(draw(f"Efficiency of {MOST} P100s over 25 Gbit/s, predicted", curves(found)))
    missed = missed_bars(found)
    console.print(*[f"missed: {text}" for text in missed] or ["all bars hold"], sep="\n")
    raise SystemExit(1 if missed else 0)


def curves(predictions: Sequence[Prediction]) -> list[Curve]:
    """What the picture shows of some predictions."""

    def headlines(model: str) -> list[Prediction]:
        own = [each for each in predictions if (each.model, each.strategy, each.setting) == (model, "data", HEADLINE)]
        return sorted(own, key=lambda prediction: prediction.devices)

    def bars(model: str) -> Iterator[tuple[str, float]]:
        for strategy, label in (("data", "data parallel"), ("search", "free search")):
            prediction = _find(predictions, model, strategy)
            if prediction is not None:
                yield label, prediction.efficiency
        yield "published", PUBLISHED[model].efficiency

    return [
        Curve(
            name=model,
            upper=tuple((each.devices, each.efficiency) for each in headlines(model)),
            lower=tuple((each.devices, each.least_efficiency) for each in headlines(model)),
            bars=tuple(bars(model)),
        )
        for model in PUBLISHED
        if _find(predictions, model, "data") is not None
    ]


def missed_bars(predictions: Sequence[Prediction]) -> list[str]:
    """What is missed of the bars, in words; of all bars whose predictions are there."""
    missed, parallel = [], {}
    for model, (least, most) in BARS.items():
        data, search = _find(predictions, model, "data"), _find(predictions, model, "search")
        if data is None:
            continue
        parallel[model] = data.efficiency
        if not least <= data.efficiency <= most:
            missed.append(f"{model} is at {data.efficiency:.1%}, not {least:.0%} to {most:.0%}")
        if search is not None and search.step_s > data.step_s * 1.001:
            missed.append(f"{model}: the free search takes {search.step_s:.4f} s, data parallelism {data.step_s:.4f} s")
    if "VGG-16" in parallel and parallel["VGG-16"] > min(parallel.values()):
        missed.append("VGG-16 scales as well as another")
    for each in predictions:
        if each.cpu_s > PLAN_CPU_S or each.process_bytes > PLAN_BYTES:
            missed.append(f"{_describe(each)}: more than a minute of CPU or 2 GB to plan")
    return missed


def _predict(
    models: Sequence[str], counts: Sequence[int], strategies: Sequence[str], deadline_s: float
) -> Iterator[Prediction]:
    with tempfile.TemporaryDirectory() as directory:
        for model in models:
            predictor = Predictor(model, Path(directory), deadline_s=deadline_s)
            if "data" in strategies:
                for count in counts:
                    settings = SETTINGS if count == MOST else {HEADLINE: SETTINGS[HEADLINE]}
                    yield from predictor.predict(settings, count, "data")
            if "search" in strategies and MOST in counts:
                yield from predictor.predict({HEADLINE: SETTINGS[HEADLINE]}, MOST, "search")


def _read_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if wrong := [count for count in counts if count not in DEVICES]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(map(str, DEVICES))}")
    return counts


def _read(path: Path | None) -> list[Prediction]:
    if path is None or not path.exists():
        return []
    return [Prediction(**fields) for fields in json.loads(path.read_text())]


def _key(prediction: Prediction) -> tuple[str, str, str, int]:
    return prediction.model, prediction.setting, prediction.strategy, prediction.devices


def _find(
    predictions: Sequence[Prediction], model: str, strategy: str, setting: str = HEADLINE, devices: int = MOST
) -> Prediction | None:
    return next((each for each in predictions if _key(each) == (model, setting, strategy, devices)), None)


def _by_devices(predictions: Sequence[Prediction]) -> Table:
    """Efficiency of data parallelism: all hidden that can be, and nothing."""
    table = Table("devices", *PUBLISHED, title="data parallelism: all hidden that can be / nothing", box=None)
    for count in sorted({each.devices for each in predictions if each.strategy == "data"}):
        cells = []
        for model in PUBLISHED:
            each = _find(predictions, model, "data", devices=count)
            cells.append("–" if each is None else f"{each.efficiency:.1%} / {each.least_efficiency:.1%}")
        table.add_row(str(count), *cells)
    table.add_row("published, 512", *(f"{published.efficiency:.0%}" for published in PUBLISHED.values()))
    return table


def _by_setting(predictions: Sequence[Prediction]) -> Table:
    """Predictions for the most devices, in full."""
    headings = (
        "model",
        "setting",
        "strategy",
        "mesh",
        "efficiency",
        "step",
        "compute",
        "waited for",
        "hidden",
        "memory",
    )
    table = Table(*headings, "products at", "gap", "CPU", title=f"{MOST} devices", box=None)
    for each in (each for each in predictions if each.devices == MOST):
        times = [
            f"{seconds * 1e3:.1f} ms" for seconds in (each.step_s, each.compute_s, each.communication_s, each.hidden_s)
        ]
        table.add_row(
            each.model, each.setting, each.strategy, each.mesh, f"{each.efficiency:.1%}", *times,
            f"{each.device_bytes / 2**30:.1f} GiB", f"{each.matmul_efficiency:.2f}",
            f"{each.gap:.1%}", f"{each.cpu_s:.1f} s",
        )  # fmt: skip
    return table


def _describe(prediction: Prediction) -> str:
    return (
        f"{prediction.model}, {prediction.strategy} on {prediction.devices}, {prediction.setting}: "
        f"{prediction.efficiency:.1%}, planned in {prediction.plan_s:.1f} s ({prediction.cpu_s:.1f} of CPU), "
        f"{prediction.process_bytes / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
