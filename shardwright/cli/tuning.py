"""Numbers of the command line that tune: how long it waits for an answer, and what it warns of."""

from __future__ import annotations

# ---- `servers`, `run` ----------------------------------------------
#: Seconds that a call may take. Less fails on a busy master, more keeps a person waiting for one that hangs.
DEADLINE_S = 10.0

#: Seconds that servers may take to end once they have drained.
SERVERS_END_S = 5.0

# ---- `doctor` ------------------------------------------------------
#: Seconds that JAX may take to name its devices: an accelerator's driver may hang.
DEVICES_DEADLINE_S = 60.0

#: Seconds that a node may take to be connected to, and a master to say how it is.
CONNECT_DEADLINE_S = 2.0
STATUS_DEADLINE_S = 5.0

#: Bytes of free memory below which `doctor` objects: an eight-device GPT-2 quickstart uses about this much.
COMFORTABLE_MEMORY_BYTES = 4 * 2**30

# ---- `status_view` -------------------------------------------------
#: Seconds of silence from which a process is shown to be silent: signs of life come every two.
SILENCE_S = 5.0
