"""The published numbers' setting, for tests; apart from them, so that a process that is spawned can import it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scaling.__main__ import MOST
from benchmarks.scaling.predictions import Prediction, Predictor
from benchmarks.scaling.settings import HEADLINE, SETTINGS


def predict_data_parallelism(model: str, directory: Path) -> Prediction:
    """Of the most devices."""
    (prediction,) = Predictor(model, directory).predict({HEADLINE: SETTINGS[HEADLINE]}, MOST, "data")
    return prediction
