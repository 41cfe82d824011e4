"""A session that trains while others send a server what they like."""

from __future__ import annotations

import numpy as np

from shardwright.errors import ShardwrightError
from shardwright.proto.v1 import operators_pb2, operators_pb2_grpc
from tests.server.programs import inputs, layouts, reference, training_step
from tests.server.raw_client import RawClient, Server

#: Seconds that a look at the log may take.
LIMIT_S = 10.0


class Witness:
    """Another session, that trains all the while; nothing that strangers send may be seen in its numbers."""

    def __init__(self, server: Server, client: RawClient) -> None:
        self._server, self._client = server, client
        self._executable, plan = client.ready_program(training_step())
        for array_id, (array, layout) in enumerate(zip(inputs(), layouts(plan)[0], strict=True), start=1):
            client.put(array_id, array, layout)
        self._stream = client.steps()
        self._w, self._w_id, self._number = inputs()[0], 1, 0
        self._executors = [process.pid for process in server.executors()]
        self._read_s = 0.0  # the newest line of the log that was seen

    def problem(self) -> str:
        """What is wrong with its next step, with the executor, or in the log; empty: nothing."""
        executors = [process.pid for process in self._server.executors()]
        if executors != self._executors:
            return f"the executor {self._executors} was replaced: {executors}"
        self._number += 1
        new, loss = 10 * self._number, 10 * self._number + 1
        self._stream.send(self._number, self._executable, [self._w_id, 2, 3], [new, loss], read_back=[loss])
        try:
            while (reply := self._stream.reply()).number != self._number:
                pass  # what it waits for
        except ShardwrightError as error:
            return f"the stream of another session ended: {error!r}"
        if reply.HasField("error"):
            return f"a step of another session failed: {reply.error}"
        value = np.frombuffer(reply.values[0].data, np.float32)
        x, y = inputs()[1:]
        self._w, expected = reference(self._w, x, y)
        self._w_id = new
        if not np.allclose(value, expected, rtol=1e-4):
            return f"another session computed {value}, not {expected}"
        return self._tracebacks()

    def _tracebacks(self) -> str:
        """New ones of all processes: nobody's message is worth one."""
        request = operators_pb2.ReadLogsRequest(level="error")
        replies = operators_pb2_grpc.OperatorsStub(self._client.channel).ReadLogs(
            request, metadata=self._client.metadata, timeout=LIMIT_S
        )
        lines = [line for reply in replies for line in reply.lines if line.traceback and line.time_s > self._read_s]
        self._read_s = max([self._read_s, *(line.time_s for line in lines)])
        return "".join(f"a traceback in the log: {line.message}\n{line.traceback}" for line in lines)
