"""Numbers of the ranks that tune: sizes of messages, and how long a rank waits for others."""

from __future__ import annotations

# ---- `fusion` ------------------------------------------------------
#: Bytes of a message, at most; and of a reduction on CPUs: what the caches and the sockets hold. Smaller ones are more
#: messages, of larger ones less overlaps.
PIECE_BYTES = 16 << 20
CPU_PIECE_BYTES = 8 << 20

# ---- `lifeline` ----------------------------------------------------
#: Seconds that a collective has to raise once a rank is known to be lost; then this rank starts anew. Less ends healthy
#: ones, more delays the next generation.
PATIENCE_S = 2.0

#: Seconds that leaving a lost generation may take: it is a matter of milliseconds.
LEAVING_PATIENCE_S = 10.0

#: Seconds between two looks whether a rank's collectives have ended, and whether it has left.
COLLECTIVES_POLL_S = 0.02
LEAVING_POLL_S = 0.1

# ---- `stall` -------------------------------------------------------
#: Seconds after which a rank that waits says for whom, where nobody asks for another time.
DEFAULT_WARNING_S = 60.0

#: Seconds that the thread which looks for those who wait has to end.
STALL_END_S = 1.0

# ---- `timeline` ----------------------------------------------------
#: Rounds in which clocks are compared: more take longer to begin, and are off by less.
CLOCK_ROUNDS = 9

#: Seconds that programs under way have to be written down at the end: less loses their times, more delays the end.
TIMELINE_END_S = 10.0

# ---- `slurm` -------------------------------------------------------
#: Hosts that a list of Slurm's is written out to, at most: a short text can name any number.
MAX_HOSTS = 1 << 20
