"""The models of the suite and the unseen ones, by name."""

from __future__ import annotations

from workloads.models.registry import MODELS
from workloads.unseen.registry import UNSEEN

EVERY_MODEL = {**MODELS, **UNSEEN}
