"""Plans are kept for the tests of this folder."""

from __future__ import annotations

from tests.kept_plans import kept_plans

__all__ = ["kept_plans"]
