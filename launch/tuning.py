"""Numbers of the launcher that tune: how long it waits for hosts, ranks and servers, and how often it looks.

`launch/node_agent.py` has its own: it goes to a host as one file.
"""

from __future__ import annotations

# ---- `launcher`, `supervision` -------------------------------------
#: Seconds that hosts have to answer, and that processes have to end after a signal, by default.
DEFAULT_START_TIMEOUT_S = 30.0
DEFAULT_GRACE_S = 10.0

#: Seconds from SIGTERM to SIGKILL after a failure: no process can continue without the lost one.
FAILURE_GRACE_S = 1.0

#: Seconds for hosts to report the killed processes; then the job ends without their word.
KILL_GRACE_S = 2.0

#: Seconds for all hosts together to end leftover processes.
CLOSE_TIMEOUT_S = 4.0

#: Seconds that a signal delivered to another thread is late, at most.
MAX_WAIT_S = 0.5

# ---- `settings`, `elastic_launcher` --------------------------------
#: Seconds without a sign of life after which a rank counts as hanging, and that a job waits for enough hosts, by
#: default.
DEFAULT_HANG_TIMEOUT_S = 60.0
DEFAULT_ELASTIC_TIMEOUT_S = 600.0

# ---- `server_supervision` ------------------------------------------
#: Seconds until a server that ended is started again: doubled from the first to the last. One that ran for the third
#: number of seconds begins with the first again.
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
STEADY_S = 60.0

# ---- `control`, `meeting` ------------------------------------------
#: Seconds that who connects has to say who it is.
HELLO_TIMEOUT_S = 10.0

#: Seconds between two signs of life of a rank: many have to fit into the time after which it counts as hanging.
BEAT_INTERVAL_S = 0.5

#: Bytes of the longest line to and from a rank, and of one where ranks meet: whoever connects may send them.
CONTROL_LINE_BYTES = 1 << 20
MEETING_LINE_BYTES = 1 << 12

#: Seconds that a connection to the meeting point may take.
CONNECT_TIMEOUT_S = 5.0

#: Seconds between two looks at the clock of who waits, and between two words to it of those for whom it waits; how many
#: of them it is told.
TICK_S = 0.25
TELL_INTERVAL_S = 1.0
MOST_NAMES = 64

# ---- `discovery` ---------------------------------------------------
#: Seconds from one look for hosts to the next: a script is a process each time, a file is read.
INTERVAL_S = 1.0
FILE_INTERVAL_S = 0.2

#: Seconds that a script may take.
SCRIPT_TIMEOUT_S = 30.0

# ---- `ssh` ---------------------------------------------------------
#: Seconds between keepalive messages; three unanswered ones end the connection. Fewer end jobs at short outages, more
#: notice a lost host late.
ALIVE_INTERVAL_S = 15

#: Seconds that `ssh -G` may take to say what a host is called.
RESOLVE_TIMEOUT_S = 10.0

# ---- `node` --------------------------------------------------------
#: Seconds that the last output of a host's agent may take once it has ended.
LAST_OUTPUT_S = 1.0

# ---- `output` ------------------------------------------------------
#: Bytes at which a line without an end is written.
MAX_LINE_BYTES = 1 << 20
