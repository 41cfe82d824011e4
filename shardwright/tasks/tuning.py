"""Number of task lists that tunes."""

from __future__ import annotations

# ---- `transfer_placement` ------------------------------------------
#: Groups of programs ahead of its reader that a receive is posted: more wait less, and take memory for longer.
GROUPS_AHEAD = 1
