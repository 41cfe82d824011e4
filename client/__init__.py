"""The thin client: lowers a step, sends it, runs it by number, and reads what the user asks for.

Reading order: session (what a user holds) → step (one parallelized function) →
frontends (function → HLO text) → programs (planned and loaded) → stream
(numbered steps) → arrays and transfer (handles and their contents).
"""

from shardwright.processes import silence_grpc

silence_grpc()
