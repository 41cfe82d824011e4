"""The models of the suite and the unseen ones, by name."""

from __future__ import annotations

from benchmarks.planner.models.registry import MODELS
from benchmarks.planner.unseen.registry import UNSEEN

EVERY_MODEL = {**MODELS, **UNSEEN}
