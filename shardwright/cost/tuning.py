"""Numbers of the costs that tune. What XLA and a device do is no such number: it stands where it is followed."""

from __future__ import annotations

# ---- `attention` ---------------------------------------------------
#: Times that float32 scores go through memory where attention is written out, forward; backward twice as often. More
#: makes that dearer beside its products. On an H200 XLA's forward and backward take 15.4 ms for 4 × 16 heads of 4,096
#: rows 128 wide: twelve passes take 11.8 ms at its bandwidth, the products 2.
SCORE_PASSES = 4
#: Arrays of float32 scores that written-out attention holds at once: XLA:CPU (jaxlib 0.10.2) takes two, forward and
#: backward. More keeps plans out that would fit.
SCORES_HELD = 2

# ---- `moves/move_table` --------------------------------------------
#: Kinds of arrays of one rank whose tables of moves are kept: more take memory, fewer are computed again.
MAX_KINDS = 32

# ---- `peak/inline` -------------------------------------------------
#: Nodes after which calls stay calls: nested ones can double the program at each level.
MAX_NODES = 500_000

# ---- `peak/heap_simulator` -----------------------------------------
#: Part of all bytes that is packed exactly; the many small buffers fill gaps. More takes longer.
PACKED_SHARE = 0.995

# ---- `peak/memory_scheduler`, `peak/memory_space_assignment` -------
#: Collectives that are started before a delayable product runs, and kernels that a value on the chip lives for at most;
#: both fitted with oracles/memory.py.
COLLECTIVES_AHEAD = 2
MAX_KERNELS = 8

# ---- `profiles` ----------------------------------------------------
#: Bytes of temporaries under `Compiler.small_temporaries_margin`: plans not covered by `temporaries_margin` have 3 and
#: 15 MB (docs/benchmarks/memory.md). More keeps plans out that would fit, fewer lets some in that do not.
SMALL_BYTES = 32 << 20
