"""The servers: a master that plans and orders, workers that own devices and run.

`master/` and `worker/` are each a pure state machine with a thin gRPC shell;
`runtime/` is what an executor child does with its devices. Start one with
`launch_worker.sh CLUSTER_JSON TASK_INDEX` or `python -m shardwright.server`.
"""

from shardwright.processes import silence_grpc

silence_grpc()
