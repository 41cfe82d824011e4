"""Numbers that tune of what has no file of its own for them: modules of `shardwright/`, and its small packages.

None of them decides what a plan is: this file is none of the sources that cached plans are kept for
(`planner/cache/keys.py`).
"""

from __future__ import annotations

# ---- `input_files` -------------------------------------------------
#: Bytes of a file that is read, at most, and seconds that a pipe or device may take to end: a cluster file of 10,000
#: nodes has some 2 MB.
MOST_BYTES = 16 * 2**20
WAIT_S = 1.0

#: The same of programs and plans: the text of the largest models, and what writes them into a pipe takes its time.
MOST_PROGRAM_BYTES = 4 * 2**30
PROGRAM_WAIT_S = 60.0

#: Bytes that are read at a time, and seconds between two looks for a writer.
INPUT_CHUNK_BYTES = 2**20
INPUT_POLL_S = 0.01

# ---- `clusters/secret_files` ---------------------------------------
#: Seconds that a program which hands a secret out through a pipe may take: it asks a server, as a rule.
PIPE_WAIT_S = 30.0

# ---- `kernels/forms` -----------------------------------------------
#: Bytes of a kernel's programs for its parts, unpacked: what a text may make a process allocate for each. One of them
#: has some 10 kB.
MAX_FORMS_BYTES = 1 << 27

# ---- `protocol/wire` -----------------------------------------------
#: Bytes of one message of a stream, about: fewer take more messages, more keep others waiting. gRPC's default limit is
#: 4 MiB.
CHUNK_BYTES = 1 << 20

# ---- `log_lines` ---------------------------------------------------
#: Bytes that are kept of a line that a child printed: XLA prints whole modules in one.
RAW_LINE_BYTES = 4000

#: Lines that are kept of what a child prints, for the case that it dies.
LAST_LINES = 100

# ---- `progress`, `progress_lines` ----------------------------------
#: Seconds between two reports of a search: more of them cost time, fewer look stuck.
PROGRESS_INTERVAL_S = 0.05

#: Seconds until what goes on is shown, and between two lines of a log.
SHOW_AFTER_S = 2.0
EVERY_S = 10.0

#: Seconds that a stage of a preparation takes before it is named in the last line.
MIN_SHOWN_S = 0.1

# ---- `offline` -----------------------------------------------------
#: Plans of searches that were interrupted, which the same call returns: so many, at most.
MOST_INTERRUPTED = 8

# ---- `builders/runner_ups` -----------------------------------------
#: Meshes of the search beside its fastest that are planned to be tried, at most.
RUNNER_UP_MESHES = 2

# ---- `report/proof` ------------------------------------------------
#: Part of the bytes by which prediction and program may differ.
PROOF_TOLERANCE = 0.02

#: Bytes of a payload that is not worth a line of the plan, all executions of a step together: reductions of scalars.
#: What a loop runs again and again soon is, for its bytes as for what each execution waits.
SMALL_PAYLOAD_BYTES = 256

# ---- `explicit/asked` ----------------------------------------------
#: Values that are looked through for a source line, where an instruction has none: fewer miss it, more may take one
#: that has nothing to do with it.
MOST_NEIGHBORS = 16
