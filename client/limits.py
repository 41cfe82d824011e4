"""Numbers of the client that tune: waits, pauses, and sizes from which things are done otherwise.

Each with its unit and what it buys; what a user may set is an option of `Session` or `parallelize` instead.
(`client/tuning.py` is `shardwright tune`.)
"""

from __future__ import annotations

# ---- `connection` --------------------------------------------------
#: Seconds that a call may take that plans, compiles and moves nothing. Less fails on a busy master, more hides one that
#: hangs.
CALL_TIMEOUT_S = 30.0

#: Seconds that the master may take to hear that a session ends: it would end without, later.
CLOSE_TIMEOUT_S = 5.0

#: Seconds that any other call may take: big models are planned and compiled for long, with progress streamed meanwhile.
LONG_CALL_TIMEOUT_S = 4 * 3600.0

#: Seconds to connect, and then to shake hands once more where that failed, only to name the reason. Less fails on slow
#: networks; more keeps the user waiting for an error.
CONNECT_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 2.0

#: Seconds that the best plan so far of a search that is interrupted may take, or half the time of planning, if that is
#: more. Less throws a plan away that was nearly written; more makes Ctrl-C late.
BEST_PLAN_TIMEOUT_S = 20.0

#: Seconds that a plan may take to come which was ready when its search was interrupted.
PLAN_ON_ITS_WAY_S = 1.0

#: Bytes of HLO text or plan JSON that a server may send, unpacked: what it may make this process allocate.
PLAN_TEXT_LIMIT_BYTES = 4 << 30

# ---- `retries`, `stream` -------------------------------------------
#: Seconds between two attempts to reach the master in an outage. Less asks a restarting master more often; more is lost
#: once it is back.
RETRY_PAUSE_S = 0.2

# ---- `stream` ------------------------------------------------------
#: Steps that may be under way before `submit` waits for the oldest. Fewer leave devices idle between steps; more hold
#: more arguments in memory, and tell of an error later.
STEPS_AHEAD = 4

#: Seconds that a closed session waits for its thread to end: more delay a program's end where it hangs.
STREAM_END_S = 5.0

# ---- `embedded` ----------------------------------------------------
#: Seconds that a child has to print its ready line (it loads JAX and opens the devices), and to end after its standard
#: input was closed. Less kills slow ones; more waits longer for those that hang.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0

# ---- `cluster_view`, `steady_calls`, `node_failures` ---------------
#: Seconds that workers have to come back after one was lost, where a call cannot do without them. Less fails a call
#: that a restart would have saved; more delays the error.
WORKER_RESTART_TIMEOUT_S = 120.0

#: Seconds between two questions whether they are all back, and between two attempts to ask their data ports.
WORKERS_POLL_S = 0.2
NODES_PAUSE_S = 0.5

#: Seconds until a call that met other nodes begins again: the new ones need a moment.
CHANGE_PAUSE_S = 0.2

#: Seconds within which the master hears of a process that died, and between two questions whether it has. Less blames
#: the connection for a death; more delays an error that names the connection.
NOTICE_S = 3.0
NOTICE_PAUSE_S = 0.1

# ---- `recovery`, `protection` --------------------------------------
#: Seconds that workers have to come back while a session is recovered. Less gives up arrays that a slow start would
#: have kept; more leaves a program waiting for nodes that are gone.
RECOVERY_PATIENCE_S = 600.0

#: Seconds between two questions whether they are back, and between two lines that say who is waited for.
RECOVERY_POLL_S = 0.1
RECOVERY_REPORT_S = 15.0

#: Recoveries in a row. What ends executors each time, the servers stop after five times; another session's losses count
#: here as well.
RECOVERY_ATTEMPTS = 12

#: Snapshots in a row that may fail before what came since the last good one is forgotten. Fewer give up protection at a
#: passing fault; more hold a longer journal.
FAILED_SNAPSHOTS = 3

#: Snapshots that may fall due while one is under way, before calls wait for it: fewer stop steps more often, with more
#: the journal grows.
SKIPPED_SNAPSHOTS = 2

# ---- `checkpoints` -------------------------------------------------
#: Seconds between two questions whether a save is complete, where the master does not answer.
SAVE_POLL_S = 1.0

# ---- `step_requests` -----------------------------------------------
#: Bytes of an argument that rides along with its step, as long as all of a step stay below the second number. More save
#: round trips; they pass through the master, which all clients share.
INLINE_BYTES = 64 << 10
INLINE_TOTAL_BYTES = 1 << 20

#: Bytes of uploads that a step keeps until it is answered, where it reads nothing else: it can then run again after a
#: loss. More cover larger batches, at that much memory for each step under way.
RESENDABLE_BYTES = 64 << 20

# ---- `programs` ----------------------------------------------------
#: Outputs of at most so many bytes come back with the reply of their step, for at most so many outputs: losses and
#: metrics without a read. More make every reply larger.
READ_BACK_BYTES = 4 << 10
READ_BACK_OUTPUTS = 16

# ---- `debug_equations` ---------------------------------------------
#: Trips whose values of `jax.debug` calls are kept, of a loop that does not say how many it has, as long as their
#: arrays stay below so many bytes. More show more of a long loop; their memory is taken, and sent, whatever comes.
DEBUG_TRIPS = 1000
DEBUG_LOOP_BYTES = 16 << 20

#: Values for `jax.debug` of at most so many bytes a step come back with its reply. More save round trips; they pass
#: through the master, which all clients share.
DEBUG_READ_BACK_BYTES = 64 << 10

# ---- `debug_lines`, `session_state` --------------------------------
#: Seconds that the thread which makes those calls waits for the next step. Less starts one more often; more keeps one
#: for a program that says nothing any more.
DEBUG_THREAD_S = 5.0

#: Seconds that a program's end waits for what its last steps have to say, where the session was not closed. Less loses
#: lines; more delays the end of a program whose servers are gone.
LAST_LINES_S = 10.0

# ---- `plan_set`, `step_programs` -----------------------------------
#: Programs of one signature that differ in the layout of the arrays they take; then arrays are moved instead. More save
#: moves, and cost a compilation and memory each.
PROGRAMS_OF_A_SIGNATURE = 2

#: Programs of a step from which on a warning says how many there are.
MANY_PROGRAMS = 4

# ---- `array_reader`, `array_operators` -----------------------------
#: Bytes of announced handles that are read with another one, its own included. More save round trips, and delay the
#: first one's contents.
READ_TOGETHER_BYTES = 64 << 20

#: Results of a step that are read one after another bring along at most so many that follow, of at most so many bytes
#: each. More save round trips; what nobody reads is sent in vain.
READ_AHEAD = 1024
READ_AHEAD_BYTES = 256 << 10

#: An operator or a function of JAX that reads more bytes warns, once per kind in a session.
LARGE_FETCH_BYTES = 64_000_000

# ---- `releases` ----------------------------------------------------
#: Seconds that an array waits for a step to carry its release. Less makes more calls; more keeps its memory for longer.
RELEASE_DELAY_S = 0.1

# ---- `resharding` --------------------------------------------------
#: State is moved to another plan's layouts in about so many parts, each of at least so many bytes. More parts need less
#: memory beside the state, and a program each.
MOVE_PARTS = 8
MIN_PART_BYTES = 64 << 20

# ---- `transfer` ----------------------------------------------------
#: Seconds that a data port may take to answer: reading a directory and the description of a checkpoint may take long on
#: a remote file system.
LISTING_TIMEOUT_S = 300.0

# ---- `datasets` ----------------------------------------------------
#: Seconds between two questions, where the servers answer without a batch, and between two lines that say which batch
#: is waited for.
BATCH_PAUSE_S = 0.02
BATCH_REPORT_S = 15.0

#: Bytes of JSON of the function's arguments: they go along with each batch.
MAX_OPTIONS_BYTES = 64 << 10

# ---- `alternatives` ------------------------------------------------
#: Part of the predicted step that a plan of the search has to save to be compiled and tried: less is not worth the
#: compilation.
MIN_PLAN_GAIN = 0.03

#: A runner-up that is predicted to take more than so many times the plan that runs is not tried: on one H100 the
#: prediction was off by a third at most (docs/hardware.md). Less misses plans that are better than predicted.
MAX_RUNNER_UP_RATIO = 1.5

#: Runners-up that are tried, at most: each is compiled, and runs `MEASURED_STEPS` and `SETTLING_STEPS`.
MAX_RUNNER_UPS = 6

# ---- `step_times`, `plan_trials` -----------------------------------
#: Steps of a plan whose median is its time. Fewer are noise, more keep a slow plan running for longer.
MEASURED_STEPS = 20

#: Steps not measured after a switch: on CPUs a new program's first eight take up to four times as long.
SETTLING_STEPS = 10

#: After so many steps a plan ends its trial, where it takes so many times as long as the fastest one.
HOPELESS_STEPS = 10
HOPELESS_RATIO = 2.0

#: A plan runs once more where it takes at most so many times as long as the fastest one. Less trusts one measurement
#: more; more repeats more trials.
NEAR_RATIO = 1.5

# ---- `tuning` ------------------------------------------------------
#: Seconds between two looks at what the searches have found.
TELL_EVERY_S = 0.5

# ---- `frontends` ---------------------------------------------------
#: Elements from which a closed-over array of JAX becomes an argument, and a constant of a graph of PyTorch. Smaller
#: ones stay in the text, larger ones would make it long.
MIN_HOISTED_ELEMENTS = 64
MIN_ARGUMENT_ELEMENTS = 64

#: `.data` of PyTorch's tensors held until the next call, so that writes through it are seen. More are held weakly: a
#: write through one whose tensor is gone by then is lost. More take memory for views that nobody uses.
MOST_HANDED_OUT = 1000

#: Calls of a PyTorch step whose checks by values (`assert x.isfinite().all()`) nobody has looked at yet. With fewer a
#: loop that reads no losses waits more often; with more an error comes so many calls later.
MOST_PENDING_CHECKS = 16

#: Places that a PyTorch step may read beside its arguments (numbers of modules, closures, globals), looked at before
#: each call. With more, a data set in a global list costs each call milliseconds; what fewer leave out is not followed.
MOST_READ_PLACES = 20_000

#: Depth of lists, dicts and objects in which such places are looked for. Deeper ones are not followed; a larger number
#: takes longer over objects that refer to half the program.
READ_DEPTH = 6

#: Elements of a numpy array that such a place compares by value. Larger ones cost each call more; they are constants.
MOST_COMPARED_ELEMENTS = 1024

#: Tensors that an error names, which a plan lays out otherwise than DTensor can. More fill the screen, fewer hide what
#: to plan anew.
MOST_LAYOUT_LINES = 20

# ---- `kernels` -----------------------------------------------------
#: Parts that a factor of a partitioned kernel is cut into, at most, and programs that a kernel is lowered to: one for
#: every way to cut its factors. Fewer leave larger clusters to other factors, more take longer (some 50 ms each): 36
#: are enough for 128 parts by two factors, 16 by three.
MAX_KERNEL_PARTS = 1024
MAX_KERNEL_FORMS = 36

#: Kernels whose parts are kept once they are lowered: fewer are lowered again, more take memory.
KEPT_KERNELS = 64
