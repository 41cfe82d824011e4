"""Numbers of the search for pipelines: what it tries, and how full and how even stages are."""

from __future__ import annotations

# ---- `choose` ------------------------------------------------------
#: Parts of the model that each stage gets under the interleaved schedule, where it does not say how many.
INTERLEAVED_CHUNKS = 2

#: Micro-batches to try, per stage: a middle number first.
MICRO_BATCHES_PER_STAGE = (4, 8, 2, 16)

#: Numbers of best candidates to try on other meshes and with other numbers of micro-batches, and with other schedules.
MAX_REFINED, MAX_SIMULATED = 2, 3

#: Fraction of a device's memory that a cut may fill: programs use up to a sixth more than predicted.
FILLED = 0.85

#: Axes of a stage's mesh.
STAGE_MESH_AXES = 2

# ---- `step_plans` --------------------------------------------------
#: Plans of one step on one mesh: the fastest one, then with memory multipliers in geometric progression, the first a
#: fraction of the fastest plan's seconds per peak byte.
MAX_PLANS, FIRST_PRICE, PRICE_RATIO = 4, 1e-2, 16.0

#: Relative gap of a plan on a mesh: it only gives costs of stages; a pipeline's other choices matter far more.
STEP_PLAN_GAP = 0.02

# ---- `device_groups` -----------------------------------------------
#: Fraction of the devices that may stay idle if their number does not suit the stages.
MAX_IDLE = 0.1

#: Numbers of stages to try.
MAX_GROUPINGS = 8

# ---- `coarsen` -----------------------------------------------------
#: Nodes to leave per chunk, at equal times.
GRAIN = 8

# ---- `cut` ---------------------------------------------------------
#: Allowed excess of the slowest chunk over the best balance, by default.
SLACK = 0.02

#: Nodes times chunks up to which the integer program decides, if the intervals' only error is to count transfers
#: between chunks of one stage.
MAX_STAGE_SLOTS = 200

# ---- `cut_ilp` -----------------------------------------------------
#: Number that the largest number of crossing bytes is scaled to: solvers' tolerances are absolute.
CROSSING_SCALE = 1e4

# ---- `schedule_cost` -----------------------------------------------
#: Micro-batches per chunk of the model with which a pipeline has been full for a while.
FULL = 3

# ---- `imbalance` ---------------------------------------------------
#: Fraction of the slowest stage's time above which stages count as even.
EVEN = 0.8

#: Relative difference of times up to which parts are equal; fraction of a chunk's time at which a part decides it.
EQUAL_TIMES, MIN_DECIDING_SHARE = 0.02, 0.6

#: Relative gain of the slowest chunk without memory limits at which memory is the reason.
MIN_GAIN_WITHOUT_LIMITS = 0.05
