"""Numbers of searches under a memory limit: which multipliers, how many plans, how exact."""

from __future__ import annotations

# ---- `lagrangian` --------------------------------------------------
#: Multipliers of the search for a first feasible plan, in units of the start plan's step time over its peak bytes. The
#: lowest finds savings of memory at no cost, the highest the least priced memory; then multipliers rise from one
#: between them, with each plan's own peaks added.
MIN_MULTIPLIER, MAX_MULTIPLIER = 8e-3, 32.0
RISING_MULTIPLIERS = (0.5, 1.0, 2.0, 4.0)

#: Bytes saved by a further rising multiplier, at most, over those saved by the last one. Where that cannot reach the
#: limit, no more are tried.
MAX_SAVING_GROWTH = 2.0

#: Peaks with a multiplier, and bounding peaks, at most: the latest.
MAX_CONSTRAINTS, MAX_BOUNDING_CONSTRAINTS = 8, 3

#: Memory of a nearly feasible plan, over the limit. A plan above it at the highest multiplier ends the search; if it
#: peaks where nothing was priced, only above `HOPELESS_RATIO`. A fastest plan above it starts with that multiplier.
NEAR_FIT_RATIO, HOPELESS_RATIO = 1.25, 1.6

#: Multipliers tried after a plan fits, at most; the ratio of two close ones; merged plans tried then, at most.
MAX_EVALUATIONS = 3
CLOSE_MULTIPLIER_RATIO = 1.05
MAX_MERGES = 24

#: Ratio of two multipliers between which plans are hardly faster than the line between their two plans.
NEAR_MULTIPLIER_RATIO = 2.0

#: Part by which a plan may undercut the dual bound of a descent, which covers the neighbourhood of one plan only.
LOCAL_BOUND_SLACK = 0.02

#: Relative gap of the solution at each multiplier; the last feasible one is solved to the end. A plan this close to the
#: fastest one counts as equal.
MULTIPLIER_GAP = 1e-3

# ---- `cutting_planes` ----------------------------------------------
#: Evaluations for a plan, at most; evaluations between merges; evaluations for a bound.
MAX_PLANE_EVALUATIONS, MERGE_EVERY = 16, 4
MAX_BOUND_EVALUATIONS = 10

#: Plans in a merge, at most; merges of all of them, before infeasible ones are merged with the best alone.
MAX_MERGED, MAX_MERGES_OF_ALL = 8, 3

#: CPU seconds of one merge's integer program, and of all merges: no more begin after them.
MAX_MERGE_CPU_S, MAX_TOTAL_MERGE_CPU_S = 5.0, 20.0

#: Failed merges in a row that end the search.
MAX_FAILED_MERGES = 3

#: The highest multiplier, in units of the fastest plan's time over the bytes available.
MAX_PLANE_MULTIPLIER = 32.0

#: Relative gap between the dual bound and the planes' maximum that ends the search; and the gap to the lowest plane of
#: a nearly cheapest plan.
PLANE_GAP = 1e-3

#: Step towards the multipliers of the planes' maximum, while it gives new plans.
STEP_FRACTION = 0.5

#: Part of the room at a peak that counts as occupied: multipliers no plan distinguishes from lower ones stay low.
ROOM_MARGIN = 1e-3

# ---- `ilp_with_memory_rows` ----------------------------------------
#: Refused plans before a feasible one within `ROWS_GAP` of the bound is accepted. Without a feasible one, refused
#: plans in a row that raise the bound by less than that before the search ends: the rows miss what refuses them.
ROWS_PATIENCE = 4
ROWS_GAP = 1e-3

# ---- `restricted_master` -------------------------------------------
#: Relative gap of the integer program, and of one with more edge entries than a small one: its plans differ by a few
#: thousandths, at times in an eighth of the time. Below: the entries of a small program, and of the largest.
MERGE_GAP, ROUGH_MERGE_GAP = 3e-3, 1e-2
MAX_SMALL_MERGE_ENTRIES, MAX_MERGE_ENTRIES = 4_000, 30_000

# ---- `recompute` ---------------------------------------------------
#: Prices of a byte, in units of the step's time over its peak bytes.
BYTE_PRICES = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 16.0, 1e4)

#: Relative increase of saved bytes from one choice to the next, at least.
MIN_SAVING = 0.02

#: Flows are exact in integers: a unit is this part of a second, or of priced bytes.
FLOW_UNITS = 1e15
