"""The package itself: its version, and where it lies. Modules read them here: `shardwright` names everything."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.2.0"

FOLDER = Path(__file__).parent
