"""Exit codes by which an executor tells its daemon, and the master, how it ended."""

from __future__ import annotations

#: Starting again will not help.
CANNOT_START = 3
