"""Numbers of the servers that tune and that no option sets: waits, pauses, what is remembered, sizes of pieces.

Beside `server/limits.py`: what stands there is a default that an operator may change, and is documented for that. These
follow from each other and from the machine; whoever changes one measures.
"""

from __future__ import annotations

# ==== The master ====================================================
# ---- `shell`, `records` --------------------------------------------
#: Seconds between two ticks of the state machine: all its time limits are late by up to as much; shorter ones cost CPU.
TICK_S = 0.5

#: Seconds between two events that count, at most: in a longer time the master itself stood still, and nobody else is
#: late for it. Less hides losses on a busy machine, more blames others for the master's pause.
LONGEST_PAUSE_S = 2.0

# ---- `causes` ------------------------------------------------------
#: Seconds from the end of an executor or its connection that another one's end may explain, in which that may be heard
#: of. Fewer blame the wrong node on a busy machine; more delay the recoveries that nothing explains.
CAUSE_S = 1.0

# ---- `cluster_service`, `cluster_watch` ----------------------------
#: Seconds between two looks for a new node.
NEW_NODE_POLL_S = 0.1

#: Seconds between two looks at a cluster file; and between two runs of a program, a process each time, and seconds that
#: it may take.
FILE_EVERY_S = 1.0
PROGRAM_EVERY_S = 5.0
PROGRAM_TIMEOUT_S = 30.0

# ---- `time_limits`, `cancels`, `watchdog` --------------------------
#: A step's time limit, as multiples of its plan's prediction and of its longest run so far. Smaller ones end healthy
#: steps, larger ones leave everybody waiting for a hanging one.
PREDICTED_FACTOR, MEASURED_FACTOR = 100.0, 10.0

#: Seconds: no step runs longer without its user's consent.
LONGEST_LIMIT_S = 24 * 3600.0

#: Seconds, whatever a user asks for: everybody's arrays go with a step that is ended, so a healthy one has to have had
#: a chance.
SHORTEST_LIMIT_S = 1.0

#: Where others would lose arrays, a cancelled step may run for so many of its longest runs.
GRACE_FACTOR = 2.0

#: A step older than so many of its longest runs is a suspect. Fewer name healthy steps, more name hanging ones late.
STALL_FACTOR = 3.0

#: Age in seconds from which Status names the step that all wait for.
SHOWN_S = 2.0

# ---- `quarantine`, `deaths`, `records` -----------------------------
#: Deaths of executors that a suspect was there at from which on it runs alone, and from which on it is not run any
#: more. Fewer stop innocent ones, more cost everybody as many losses.
TRIAL_DEATHS = 2
MOST_DEATHS = 5

#: Successes after which deaths are forgotten: of executors that ended of themselves, and of those that may have been
#: killed; and seconds.
CLEARING_SUCCESSES = 20
CLEARING_SUCCESSES_OF_KILLED, FORGET_S = 1, 3600.0

# ---- `elasticity` --------------------------------------------------
#: Seconds without a step after which a session is quiet: it may not take a snapshot for long, and is not waited for.
QUIET_S = 5.0

# ---- `sessions`, `teams`, `named` ----------------------------------
#: Outcomes of saves that a session remembers, and programs of earlier teams of which its steps are told what became of
#: them. More explain older ones, and take memory on the master.
MAX_REMEMBERED_SAVES = 64
MAX_REMEMBERED_PROGRAMS = 1_000

#: Ids of arrays that are gone which are remembered, to say why, by the master and by executors; older ones count as
#: unknown.
MAX_REMEMBERED_DROPS = 65_536

#: Array ids that a successor leaves out: the last ones of before a restart of the master may not have been stored.
ID_MARGIN = 1 << 20

# ---- `service`, `operator_service` ---------------------------------
#: Seconds between two words to a client whose program is compiled.
PROGRESS_S = 1.0

#: Seconds between two looks for new lines of a log that is followed, and lines in one message.
FOLLOW_S = 0.3
MOST_LINES_FOLLOWED = 500

# ---- `planning`, `programs`, `store` -------------------------------
#: Characters that an error quotes of a planner's standard error, and seconds that reading it may take.
PLANNER_LAST_CHARACTERS, PLANNER_LAST_WORDS_S = 2000, 1.0

#: Bytes of text that are in memory at a time while a program comes in, before its limit is checked.
SLICE_BYTES = 1 << 20

#: Seconds that a write may wait for a reader of the database (a backup, a person with a shell); then it fails.
STORE_BUSY_S = 10.0

# ---- `statistics` --------------------------------------------------
#: Seconds over which a rate is taken: fewer follow changes faster, more are steadier.
RATE_S = 10.0

# ==== Daemons and what their executors say ==========================
# ---- `worker/executor`, `worker/reports` ---------------------------
#: Seconds between two signs of life: several have to fit into `Limits.silence_s`.
HEARTBEAT_S = 2.0

#: Seconds between two looks at what there is to report, and lines of the log in one message: lines are as late as that.
REPORT_S = 0.5
MOST_LINES_REPORTED = 200

#: Calls of the data port that may block on devices or on their clients; of them, those that uploads may hold that bring
#: nothing. The rest answers everybody else.
TRANSFER_THREADS = 32
MOST_UPLOADS = 24

#: Calls of the snapshot service of a daemon at a time.
SNAPSHOT_THREADS = 8

# ---- `worker/state`, `worker/daemon`, `worker/master_link` ---------
#: Seconds between two attempts of a daemon to reach the master: doubled from the first to the last; and the last one of
#: a daemon whose executor waits for a master that is started again.
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
LAST_RETRY_OF_A_KEPT_S = 0.3

#: The same of an executor.
LINK_RETRY_S = 0.2

#: Seconds that one attempt to reach the master may take; a refused connection is known at once.
CONNECT_S = 5.0

#: Seconds that the master has, after the limit of a drain, to let a node go.
LET_GO_S = 2.0

# ---- `own_node`, `run` ---------------------------------------------
#: Bytes from which the log of the master's own daemon begins anew; the one before is kept.
NODE_LOG_BYTES = 8 << 20

#: Seconds that this daemon waits for the one before it to end; between two looks at it, and between two starts.
TAKE_OVER_S = 5.0
NODE_LOOK_S, NODE_PAUSE_S = 0.2, 1.0

#: Seconds that it has to end.
NODE_END_S = 10.0

#: Seconds between two looks whether it, or the one before it, has ended.
NODE_END_POLL_S = 0.05

#: Seconds that calls under way have at the end of a master; then they are cut off.
CALLS_END_S = 2.0

#: Threads for short work (unpacking, writing plans down), beside those of plans and compilations.
THREADS_BESIDE = 8

# ==== Every process =================================================
# ---- `__main__`, `worker/executor` ---------------------------------
#: Seconds that the last lines of the log may take at the end of a process.
LAST_WORDS_S = 1.0

#: Seconds between two looks whether they are written.
LAST_WORDS_POLL_S = 0.005

# ---- `logs`, `log_store` -------------------------------------------
#: Lines that may wait for their reader; what comes then is dropped, so that a slow terminal stops no server.
WAITING_LINES = 10_000

#: Bytes that are kept of one line, and characters of each text in it.
LINE_BYTES, TEXT_CHARACTERS = 16_000, 8_000

#: What a process keeps of its own lines.
RECENT_LINES, RECENT_BYTES = 2000, 1 << 20

#: Bytes that the master keeps of all nodes' lines together, and of one of them at most, and at least. More reach
#: further back.
STORE_BYTES, MOST_NODE_BYTES, LEAST_NODE_BYTES = 32 << 20, 2 << 20, 16 << 10

#: Bytes that a line takes beside its texts, about.
LINE_OVERHEAD_BYTES = 400

# ---- `access`, `signals`, `metrics` --------------------------------
#: Seconds between two looks at the tokens file: what is taken out of it works for so much longer.
TOKENS_LOOK_S = 1.0

#: Seconds between two looks at a preemption notice, seconds that one may take, and bytes of an answer that are read.
PREEMPTION_POLL_S, PREEMPTION_LOOK_S = 1.0, 2.0
PREEMPTION_ANSWER_BYTES = 64

#: Seconds that a scrape waits for the event loop; then it fails.
SCRAPE_S = 5.0

# ---- `free_memory`, `black_box` ------------------------------------
#: Seconds in which those who free memory have come to their end: earlier, a collection would find nothing.
SETTLING_S = 1.0

#: Threads that are at work at a time, at most, and bytes of what each says: of further and longer ones nobody knows
#: what they were busy with.
BLACK_BOX_PLACES, BLACK_BOX_PLACE_BYTES = 64, 512

# ==== Executors: `runtime/` =========================================
# ---- `runtime/executor`, `runtime/activity`, `runtime/command_log` -
#: Seconds from the failure of a step to its report, where other processes take part. A failure may come of a neighbour
#: that died; the master notices that within this time, and ends this process before it blames the program.
SUSPICION_S = 2.0

#: Failures that follow within so many seconds are of the same cause, and reported at once.
SAME_CAUSE_S = 10.0

#: Seconds that a command has to have taken to be named as what an executor is busy with.
BUSY_S = 1.0

#: Outcomes of a session's last steps that are kept: as many as a client can ask for again.
KEPT_STEPS = 128

# ---- `runtime/array_waits`, `runtime/transfer_service`, `runtime/uploads`
#: Threads that read, and those of them that may wait for a device.
READERS, READERS_WAITING = 32, 8

#: Seconds between two looks at arrays that are being computed: reads are late by up to as much.
ARRAYS_POLL_S = 0.005

#: Reads of one session that may wait.
WAITS_PER_SESSION = 1024

#: Seconds that a fetch without a deadline of its own waits for its array.
DEFAULT_WAIT_S = 600.0

#: Seconds that a client has to hear in its own call that its session ended; then the call is cut off.
UPLOAD_LAST_WORD_S = 2.0

#: An upload that brings nothing for so many seconds may have to leave its thread to others.
STALL_S = 30.0

# ---- `runtime/transport` -------------------------------------------
#: Seconds between two looks at something that cannot be waited for, doubled from the first to the longest: short ones
#: cost CPU, long ones delay a stage.
FIRST_PAUSE_S, LONGEST_LOOK_S = 20e-6, 1e-3

#: Seconds after which whoever waits on a condition looks whether the step was stopped.
STOP_POLL_S = 0.05

#: Sockets of a transfer server that contents go through.
TRANSFER_SOCKETS = 2

# ---- `runtime/snapshots` -------------------------------------------
#: Seconds that an answer of a daemon may take, and one that comes with contents.
DAEMON_TIMEOUT_S = 10.0
DAEMON_TRANSFER_TIMEOUT_S = 3600.0

#: Daemons that hold each part: this node's, and the next one's that answers. More survive more nodes that are lost at
#: once, for as much host memory and network each.
COPIES = 2

# ---- `runtime/checkpoints` -----------------------------------------
#: Bytes of the largest chunk in which arrays are stored and read. Smaller ones are more requests; of larger ones more
#: is read for a small part.
CHECKPOINT_CHUNK_BYTES = 32 << 20

#: About the bytes of a piece that is read at once, and how many are at the same time.
TILE_BYTES = 32 << 20
TILES = 8

#: Bytes read from files before they are put on the devices: host memory for fewer, longer reads.
CHECKPOINT_READ_AHEAD_BYTES = 1 << 30

#: Saves of several sessions that are written at the same time, and orders whose outcomes are remembered.
CHECKPOINT_WRITERS = 4
REMEMBERED_ORDERS = 64

#: Seconds until a directory that one node has made must be seen by the others (network file systems cache).
DIRECTORY_VISIBLE_S = 20.0

#: Seconds between two looks for it.
DIRECTORY_POLL_S = 0.2

#: Seconds between two renewals of a claim, and after which one that was not renewed has lapsed: so long is the
#: directory of a killed server taken.
RENEW_S = 10.0
LEASE_S = 60.0

# ---- `runtime/datasets` --------------------------------------------
#: Seconds after which whoever waits for a batch looks whether it still should.
BATCH_POLL_S = 0.05

#: Seconds without a call after which a reader ends; it is made again where it is needed.
READER_IDLE_S = 600.0

#: Batches that a reader may be asked to hold beyond those that it reads ahead: more are an oversight of the client.
MAX_HELD = 64

#: Readers of a session that are kept; the one unused for longest makes room.
MAX_READERS = 16

#: Seconds after which a call ends without a batch; the client asks again, so that no thread waits for one that is gone.
BATCH_WAIT_S = 2.0

#: Calls that wait for a batch at the same time; others end at once: the threads are those of the whole data port.
MAX_BATCHES_AWAITED = 8
