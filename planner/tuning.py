"""Numbers of the planner that tune, where no file beside a package has them (`planner/search/tuning.py` and others do).

How far a search goes is `planner/limits.py`.
"""

from __future__ import annotations

# ---- `clock` -------------------------------------------------------
#: Seconds always granted to indispensable work, however late it is. Fewer leave no plan, more break short deadlines.
MIN_TIME_S = 0.5

#: Time between a deadline and the answer, at most: a part of it, or seconds, the larger of the two.
GRACE_FRACTION, GRACE_S = 0.2, 2.0

#: Seconds to write a plan, per second to build it: 0.7 to 1.0 in programs of 30,000 and 60,000 instructions. Less ends
#: late, more ends the search early.
WRITE_TIME_RATIO = 1.2

# ---- `parallel` ----------------------------------------------------
#: Seconds to wait for a result of the second core; then the work is done again here. And between two looks whether to
#: wait on.
PARALLEL_TIMEOUT_S = 120.0
PARALLEL_POLL_S = 0.2

# ---- `cache` -------------------------------------------------------
#: Entries and bytes of `default_store`, per name: more answer older questions, on more disk.
MAX_CACHE_ENTRIES = 4096
MAX_CACHE_BYTES = 512 << 20

#: Part of the limits (one in so many) written by one process between two sweeps of a folder. Smaller parts list the
#: folder more often, larger ones exceed the limits by more.
SWEEP_PART = 16

#: Age in seconds from which an unfinished file belongs to a dead process.
STALE_S = 3600.0

#: Fraction of the deadline from which a search counts as cut short: the next one may get further.
CUT_SHORT_FRACTION = 0.9

# ---- `warm_start` --------------------------------------------------
#: Records of earlier searches per kind of query, at most; the latest are kept.
MAX_RECORDS = 8

#: Tolerated relative excess over the expected step: as large as a certified gap. Above it, everything is searched
#: again.
COST_TOLERANCE = 0.01

#: With other sizes or devices: maximum ratio to the best mesh's fastest step, memory aside, of the meshes searched
#: again. A larger one searches more meshes, a smaller one may miss the best.
NEAR_FASTEST_RATIO = 1.03

#: Minimum ratio of work per micro-batch to count as no less: fixed work does not grow with the batch.
MIN_WORK_SHARE = 0.9

# ---- `reuse` -------------------------------------------------------
#: Part of a program's computing instructions that a plan has to say something of: below, it is of another program.
MIN_TAKEN = 0.5

# ---- `min_devices` -------------------------------------------------
#: Multiples of the cluster to try, each twice the one before it.
MAX_DOUBLINGS = 4

# ---- `microbatch` --------------------------------------------------
#: Arguments whose dimensions are tried as the batch, the largest first: where parameters that are not trained are
#: arguments of their own, they may be larger than the batch.
MAX_BATCH_ARGUMENTS = 4

# ---- `pipeline` ----------------------------------------------------
#: Elements of values that every stage computes for itself from small arguments, at most: larger ones are computed once
#: and sent.
MAX_REPEATED_ELEMENTS = 64

# ---- `plans` -------------------------------------------------------
#: Nodes to look at for the argument whose gradient a node is part of; then no cause is named.
MAX_GRADIENT_PARTS = 32

# ---- `strategies` --------------------------------------------------
#: Elements of the smallest array whose axes may be rotated: below, no order saves the planning time it costs.
MIN_ROTATED_ELEMENTS = 1 << 20

#: Padding of all shards together, at most, relative to the elements: 12 over 8 devices are 16. More allows more meshes,
#: and more strategies to search.
MAX_PADDING = 1 / 3

#: Dimensions of fewer elements are not padded: the three projections of a fused attention.
MIN_PADDED_SIZE = 4

#: Total penalty of a plan that breaks ties, at most, relative to the program's lower bound: far below any gap.
MAX_TIE_SHARE = 1e-5

#: Characters of the longest literal that is looked at as a number.
MAX_NUMBER_LENGTH = 40

# ---- `costs` -------------------------------------------------------
#: Moves of arrays of up to so many dimensions are priced as XLA makes them in bounds, too: they are fewer, and decide
#: more. More dimensions tighten bounds and take longer.
EXACT_RANK = 3

# ---- `constraints` -------------------------------------------------
#: Part of the values that a program pins, and their number, from which its types do it and not its author. A lower part
#: calls a densely annotated program typed, a higher one misses typed ones with many values that have no type (0.69 to
#: 0.94 in five steps).
TYPED_FRACTION = 0.5
MIN_TYPED_VALUES = 8

# ---- `offload` -----------------------------------------------------
#: Least bytes of an array of the optimizer that may go to the host. Smaller: biases and norms, a thousandth of the
#: state, cost two transfers a step each, some microseconds whatever they move; larger: small models keep all of theirs.
MIN_OFFLOADED_BYTES = 1 << 20

# ---- `graph` -------------------------------------------------------
#: Instructions of a program above which calls stay calls: nested ones can double the program at each level.
MAX_INLINED_INSTRUCTIONS = 500_000

#: Nesting of regions and calls that are written out, at most.
MAX_INLINED_DEPTH = 100

#: Priced trips of an unbounded loop: many, to make hoisting its communication worthwhile.
UNKNOWN_TRIPS = 10

#: Instructions to go through for the origin of a value, and depth of constant expressions.
MAX_ORIGIN_STEPS = 200

# ---- `rewrites` ----------------------------------------------------
#: A dimension cut into more pieces than this is cut for its elements, not because it holds several things at once.
MAX_PIECES = 64

#: Rounds of splitting: a block of one round may hold several things itself.
MAX_SPLIT_ROUNDS = 4

#: Instructions of a region that is simplified, at most.
MAX_REGION_INSTRUCTIONS = 1000

#: Elements up to which a top-k is searched for in rounds, as many as routers take: each round reads the whole array.
MAX_TOP_K_ROUNDS = 8

#: Operations in the time of a byte, where no profile says them: of an H100 with bfloat16. Smaller: tiles of fewer rows,
#: and more copies of matrices; larger: more rows multiplied in vain.
TILE_FLOPS_PER_BYTE = 236.0

#: Rows of a block for the kernel of ragged products, at least, and groups, at most: it goes through all groups for each
#: block, unrolled.
LEAST_BLOCK_ROWS = 8
MOST_KERNEL_GROUPS = 128

#: Trips of the longest loop that counts as one over layers.
MAX_LAYERS = 4096

# ---- `rules` -------------------------------------------------------
#: Parts tried for a split with borders, at most: smaller shards only reach further beyond their neighbours.
MAX_BORDER_PARTS = 16

# ---- `plans/kernel_notes` ------------------------------------------
#: Part of the step, or of the memory, from which a plan speaks of a kernel, and certifies nothing where it is whole or
#: has no price: less speaks of what hardly counts, more certifies what is not known.
MIN_KERNEL_SHARE = 0.03
