"""Numbers of the solver: tolerances, and how long it tries. Each is one trade of time for exactness."""

from __future__ import annotations

# ---- `dual` --------------------------------------------------------
#: Maximum of rounds (sweeps forward and back), and the relative gain over the last `MESSAGE_PATIENCE` of them
#: below which they end. After the first and every `DECODE_EVERY`-th an assignment is decoded.
MAX_MESSAGE_ROUNDS = 150
MESSAGE_PATIENCE = 5
MIN_MESSAGE_GAIN = 1e-5
DECODE_EVERY = 3

#: States are dropped only if at most this fraction remains.
WORTH_DROPPING = 0.8

#: Limit of a warm-start message, as a multiple of an assignment's value: beside large numbers the
#: last digits are lost.
MAX_MESSAGE = 1e3

#: Relative gap that counts as none: rounding in the last digits, over thousands of additions.
TIGHT = 1e-9

# ---- `solve` -------------------------------------------------------
#: Cores of up to so many states are solved to optimality; larger ones until this relative gap is proven.
EXACT_STATES = 2000
GAP_TOLERANCE = 1e-4

#: With a nearly exact bound and a worse incumbent, the best assignment has states that hardly raise the bound:
#: fractions of the gap up to which states are tried, one after the other; then all that remain.
GAP_SHARES = (1e-4, 1e-3, 3e-3, 1e-2, 4e-2)

#: Entries of the edges of the largest integer program that is started, with a gap allowed and without, and
#: the work it may take (`ilp.solve`): with many equally good choices the first linear relaxation of 60,000 entries
#: takes 5 s, and of 13,000 entries each further one 0.1 s, mostly for a bound that nobody waits for.
MAX_ENTRIES_WITH_GAP, MAX_ENTRIES = 15_000, 25_000
MOST_WORK = 60_000

# ---- `ilp` ---------------------------------------------------------
#: Relative gap that counts as optimal.
EXACT = 1e-9

#: CPU seconds of one integer program: a plan must not depend on the machine's load. What keeps programs
#: short is their size (`MAX_ENTRIES`, `memory.tuning.MAX_MERGE_ENTRIES`): they take up to ten.
MAX_CPU_S = 60.0

#: Objective value that the incumbent is scaled to.
OBJECTIVE_SCALE = 1e4

# ---- `local_search` ------------------------------------------------
#: Sweeps of a descent over all variables, at most: a stop for assignments that gain in rounding only.
MAX_DESCENT_SWEEPS = 50

# ---- `message_passing` ---------------------------------------------
#: Relative drop of the bound above which it is more than rounding.
ROUNDING = 1e-12

# ---- `pbqp` --------------------------------------------------------
#: Numbers that are added at a time where two edges become one: they stay in the cache.
JOIN_BLOCK = 1 << 14
