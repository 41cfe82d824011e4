"""Opcodes always computed whole on every device, each with the reason.

tests/planner/rules/test_whole.py pins XLA's gathers, and fails once XLA changes.
"""

from __future__ import annotations

from shardwright.hlo.opcodes import COLLECTIVES, DEVICE_NUMBERS
from shardwright.planner.rules.base import register_replicated

register_replicated(
    "a collective: the program is already partitioned",
    *sorted(COLLECTIVES), *sorted(DEVICE_NUMBERS),
    "all-gather-done", "all-gather-start", "all-reduce-done", "all-reduce-start", "collective-permute-done",
    "collective-permute-start",
)  # fmt: skip
register_replicated(
    "talks to the host or to another program, once and in order",
    "after-all", "infeed", "outfeed", "recv", "recv-done", "send", "send-done",
)  # fmt: skip
register_replicated(
    "made by XLA's own scheduling or fusion, after sharding is decided",
    "async-done", "async-start", "async-update", "copy-done", "copy-start", "fusion",
)  # fmt: skip
register_replicated(
    "random numbers from a hidden state: every device must draw the same ones",
    "rng", "rng-get-and-update-state",
)  # fmt: skip
register_replicated("new in XLA: jaxlib's parser does not know it yet", "shuffle")
register_replicated("XLA draws all numbers on every device; a split result is cut out of them", "rng-bit-generator")
register_replicated("its size is known only at run time", "dynamic-reshape", "get-dimension-size", "set-dimension-size")
register_replicated("XLA cannot convert block-scaled products to StableHLO", "scaled-dot")
register_replicated("XLA's partitioner has no case for the scan opcode (JAX's scan is a while)", "scan")
register_replicated("XLA gathers the batch, and its features as well; taken apart before the search",
                "batch-norm-grad", "batch-norm-inference", "batch-norm-training")  # fmt: skip
