"""Numbers of the search over meshes and variants: what it tries, and what counts as a gain."""

from __future__ import annotations

from shardwright.planner.memory.tuning import MIN_MULTIPLIER

# ---- `search` ------------------------------------------------------
#: Maximum number of axes of meshes searched outright by default; maximum numbers of refinements to one axis more.
MAX_SEARCHED_AXES = 2
MAX_DESCENTS = 4
MAX_ROUNDS_IF_LARGE = 1

# ---- `solutions` ---------------------------------------------------
#: Minimum relative gain over an earlier mesh (fewer axes or more data parallelism): the cost model resolves no smaller
#: difference.
MIN_GAIN = 1e-3

# ---- `candidates` --------------------------------------------------
#: Relative difference up to which two steps are the same: they differ in rounding only.
SAME_STEP = 1e-9

# ---- `mesh_search` -------------------------------------------------
#: Relative gap of the single mesh solved with `effort="fast"`.
FAST_GAP_TOLERANCE = 5e-3

#: Relative gap of plans to be refined, in large programs.
LARGE_GAP_TOLERANCE = 1e-3

# ---- `memory_tradeoffs` --------------------------------------------
#: Minimum relative gain over an earlier entry.
MIN_ENTRY_GAIN = 1e-3

#: Minimum relative gain of more micro-batches. Their overhead is predicted least accurately: GPT-2 124M on 8 devices
#: with two micro-batches was predicted 1.8 % faster than rematerialization, and was 2.9 % slower counted in XLA's
#: program.
MIN_MICRO_BATCH_GAIN = 3e-2

#: Relative excess of a fitting plan over an infeasible one up to which the search stops. The fitting plan may be on a
#: much slower mesh.
NEAR_FASTEST = 1e-2

#: Minimum possible gain of the remaining table entries, each a search of its own.
MIN_TABLE_GAIN = 3e-3

#: Minimum gain of the fastest plan of more micro-batches to be fitted with a multiplier before trying even more.
MIN_FITTING_GAIN = 0.1

#: Memory ratio of two meshes' fastest plans up to which the slower mesh saves too little to search it.
SIMILAR_MEMORY_RATIO = 1.05

#: Maximum number of entries fitted with a multiplier besides the unchanged program. Estimate of an entry: step of its
#: fastest plan × memory need / budget.
MAX_FITTED = 2

# ---- `min_memory_plan` ---------------------------------------------
#: Default maximum number of micro-batches.
MAX_MICRO_BATCHES = 16

#: Maximum when no smaller number fits: each part has work of its own on every device.
MAX_MICRO_BATCHES_IN_NEED = 256

# ---- `dual_bound` --------------------------------------------------
#: Maximum number of multipliers tried upwards (and downwards), and their ratio.
MAX_MULTIPLIERS = 2
MULTIPLIER_RATIO = 2.0

#: With cutting planes: maximum number of cuts, growth of the multiplier while no tangent falls, relative gap per cut.
MAX_CUTS = 6
MULTIPLIER_GROWTH = 16.0
CUT_GAP = 1e-3

#: Finer relative gap, used when a small difference decides.
FINE_CUT_GAP = 1e-4

# ---- `branching` ---------------------------------------------------
#: Growth of the higher multiplier when the two plans at the best multiplier differ in no value's size.
BRANCH_MULTIPLIER_GROWTH = 2.0

#: Maximum number of consecutive failed searches; later branches are only bounded.
MAX_FAILED_SEARCHES = 3

# ---- `gap_closing` -------------------------------------------------
#: Maximum number of entries with per-peak multipliers (some twenty iterations at 0.12 s a million).
MAX_REFINED_ENTRIES = 50_000_000

#: Multipliers to round a plan at when the fastest one does not fit, in units of `lagrangian`: nearly zero first, to
#: find savings at no cost.
ROUNDING_MULTIPLIERS = (MIN_MULTIPLIER, 8 * MIN_MULTIPLIER, 64 * MIN_MULTIPLIER)

#: Gap above which the bound, more than the plan, is far from the optimum.
WIDE_GAP = 0.03

# ---- `local_search` ------------------------------------------------
#: Minimum relative gain of a successful round.
MIN_BLOCK_GAIN = 1e-4

#: Relative gap of each round's solution.
BLOCK_GAP = 2e-3

#: Maximum number of rounds per block of axes.
MAX_BLOCK_ROUNDS = 3

# ---- `experts` -----------------------------------------------------
#: Fraction of the memory limit up to which data parallelism is tried as first plan. On six models training on 8 devices
#: `_estimate_bytes` gives 0.91 to 1.06 times the plans' needs.
LIKELY_FIT_SHARE = 0.9

#: Maximum number of mesh axes of experts' plans.
MAX_EXPERT_AXES = 2

# ---- `overlap_cap` -------------------------------------------------
#: Maximum number of further searches; and the tolerated excess overlap relative to the step.
MAX_OVERLAP_ROUNDS = 3
MIN_EXCESS_OVERLAP = 1e-3

# ---- `alternative_meshes` ------------------------------------------
#: Maximum number of meshes tried to name one in an error.
MAX_MESHES_SOLVED = 8
