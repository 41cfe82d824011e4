"""Numbers of the choice problem over segments: when rounds end, and what is too small to count."""

from __future__ import annotations

# ---- `bound` -------------------------------------------------------
#: Rounds of messages, at most. Stops: (rounds, relative gain over them) that end message passing; `ROUGH_STOP` for
#: problems with every strategy on three axes, with expensive rounds.
MAX_BOUND_ROUNDS = 200
FINE_STOP = 5, 3e-5
ROUGH_STOP = 2, 6e-4

#: Relative gap of the bound on the segments outside the runs.
REST_GAP = 5e-4

#: The same for an assignment to descend from.
TIED_GAP = 1e-3

# ---- `descent` -----------------------------------------------------
#: Part of the step time saved by a round, at least, to try the other axes again; and the gap of a solved round.
MIN_ROUND_GAIN = 1e-3
ROUND_GAP = 1e-3

# ---- `cheap_values` ------------------------------------------------
#: Recomputed values' part of the program's compute time, at most: of all of them, and of equal instructions.
MAX_CHEAP_SHARE, MAX_EQUAL_SHARE = 1e-3, 1e-4

# ---- `cost_graph` --------------------------------------------------
#: Tie break between equal layouts of a stored fill value or of a loop's accumulated value: the smaller layout wins, by
#: this part of the time to write it.
STORAGE_TIE_BREAK = 1e-3
