"""The planner's process: `python -m shardwright.server.master.planner_child PARENT_PID`.

Planning takes seconds of pure Python; here it blocks nobody and can be ended
when the client goes away. Talks frames (`xla.messages`) over stdin and stdout
with `planning.PlannerPool`, one program at a time.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from shardwright.clusters.cluster import Cluster
from shardwright.errors import ShardwrightError
from shardwright.log_lines import about, log_to_parent
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.plans.plan_text import plan_to_json
from shardwright.processes import die_with_parent
from shardwright.progress import PlanProgress, ProgressThrottle
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import plan_messages, wire
from shardwright.server.master.programs import unpack_program
from shardwright.xla.messages import read_message, write_message

if TYPE_CHECKING:
    from shardwright.planner.clock import Interruption

_log = logging.getLogger("shardwright.server")

#: What is added to the niceness of a planner that nobody waits for.
LOWEST_PRIORITY = 19


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a solver prints must not end up among the frames
    log_to_parent("planner")
    gc.disable()  # what is imported stays for good
    from shardwright.planner.cache.plan_cache import plan_with_cache  # loaded ahead of the first request
    from shardwright.planner.cache.store import default_store

    gc.enable()
    from shardwright.planner.clock import Interruption

    plan = partial(plan_with_cache, store=default_store("plans"))
    interruption = Interruption()
    signal.signal(signal.SIGINT, lambda number, frame: interruption.begin())

    while (message := read_message(requests.read)) is not None:
        try:
            with about(**message[0]["about"]):
                _plan_logged(partial(_plan, plan, interruption), message[1], replies)
        except Exception as caught:
            error = wire.error_to_proto(wire.to_shardwright_error(caught))
            write_message(replies, {"kind": "error"}, [error.SerializeToString()])


def _plan_logged(act: Callable[[list[bytes], BinaryIO], None], blobs: list[bytes], replies: BinaryIO) -> None:
    began_s = time.monotonic()
    try:
        act(blobs, replies)
    except ShardwrightError as error:
        _log.info("no plan after %.1f s: %s", time.monotonic() - began_s, error.message)
        raise
    except Exception as error:
        _log.exception("planning failed: %s: %s", type(error).__name__, error)
        raise
    _log.info("planned in %.1f s", time.monotonic() - began_s)


def _plan(
    plan: Callable[..., Plan | PipelinePlan], interruption: Interruption, blobs: list[bytes], replies: BinaryIO
) -> None:
    from shardwright.planner.clock import Clock

    interruption.at_s = None  # what came before this search was for another one …
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # … but at the first one, when modules were loaded
    cluster: Cluster = pickle.loads(blobs[0])  # from our own parent, never from the network
    request = master_pb2.PlanProgramRequest.FromString(blobs[1])
    options = plan_messages.plan_options(request)
    clock = Clock(options.deadline_s, takes_first=request.first_plan, interruption=interruption)
    if request.in_background:
        os.nice(LOWEST_PRIORITY)
    if request.device_count:
        cluster = cluster.part(request.first_device, request.device_count)

    def tell(report: PlanProgress) -> None:
        write_message(replies, {"kind": "progress"}, [plan_messages.plan_progress_to_proto(report).SerializeToString()])

    progress = ProgressThrottle(tell)
    result = plan(unpack_program(blobs[2]), cluster, options, progress=progress, clock=clock)
    progress.flush()
    write_message(replies, {"kind": "plan"}, [plan_to_json(result).encode()])


if __name__ == "__main__":
    main()
