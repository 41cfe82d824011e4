"""Numbers of compilation that tune: what children may take, and how far a program is looked at."""

from __future__ import annotations

# ---- `child` -------------------------------------------------------
#: Seconds that a child may take to start, JAX and a device's compiler included.
CHILD_START_TIMEOUT_S = 120.0

#: Seconds that reading what a dead child printed may take.
LAST_WORDS_S = 1.0

# ---- `service` -----------------------------------------------------
#: Bytes that a child takes for the smallest program, and for a megabyte of StableHLO, by the square of them: GPT-2 of
#: 12, 24 and 48 layers takes 0.7, 2.3 and 12.5 GB. Less runs out of memory, more leaves cores idle.
BYTES_OF_ANY = 400 << 20
BYTES_OF_SQUARE_MB = 1 << 30

#: Bytes of text for which another child is worth its start, 1.6 s of CPU.
BYTES_WORTH_A_CHILD = 200_000

#: Seconds that the next request waits for a child whose last program was only to be partitioned and which compiles it
#: to the end; after that another child is started.
FINISHING_PATIENCE_S = 2.0

#: Seconds between two looks at whether a compilation that waits for a child is still wanted.
SLOT_LOOK_S = 0.5

# ---- `compiling` ---------------------------------------------------
#: Seconds between two looks for the partitioned program that XLA writes while it compiles.
DUMP_POLL_S = 0.05

# ---- `formats`, `referee` ------------------------------------------
#: Seconds that XLA's reader may take; a program of 50,000 instructions takes seconds.
READER_TIMEOUT_S = 600.0

#: The same where only its opinion is asked for.
REFEREE_TIMEOUT_S = 60.0

# ---- `offsets`, `reduce_scatter` -----------------------------------
#: Operations to follow before giving up on an offset; instructions to look at before giving up on a slice's.
OFFSET_DEPTH = 60
OFFSET_LIMIT = 200

# ---- `private` -----------------------------------------------------
#: Seconds that a process which has ended waits for the others to end, which may train or save for hours yet: ten days.
#: After jaxlib's five minutes both would be killed.
SHUTDOWN_PATIENCE_S = 864_000

# ---- `ragged_kernel` -----------------------------------------------
#: Loads of JAX's kernel of ragged products that are under way at once, as measured on an H200 (docs/hardware.md), and
#: blocks of a result's columns that are computed side by side, of which the first that divides them counts: rows are
#: then read once for all of them, while the matrix stays in the cache.
RAGGED_STEPS = 4
RAGGED_COLUMNS = (8, 4, 2, 1)

#: Parts of ragged products whose programs are kept: each takes half a second to lower.
RAGGED_PARTS = 64
