"""The stream of numbered steps against a scripted server on the loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

from shardwright.client.limits import STEPS_AHEAD
from shardwright.client.stream import StepStream
from shardwright.errors import ExecutionError, ServerUnavailableError, SessionError
from shardwright.proto.v1 import common_pb2, master_pb2, master_pb2_grpc
from shardwright.protocol import wire

Requests = Iterator[master_pb2.RunStepsRequest]
Act = Callable[[Requests, grpc.ServicerContext], Iterator[master_pb2.RunStepsReply]]


class ScriptedMaster(master_pb2_grpc.MasterServicer):
    """Each connection plays the next act; all that was received is kept."""

    def __init__(self, *acts: Act) -> None:
        self._acts = list(acts)
        self.received: list[list[int]] = []

    def RunSteps(self, request_iterator: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
        numbers: list[int] = []
        self.received.append(numbers)
        act = self._acts.pop(0)

        def steps() -> Requests:
            for request in request_iterator:
                assert request.session_id == "s"
                numbers.append(request.number)
                if request.number:
                    yield request

        yield from act(steps(), context)


@pytest.fixture
def play() -> Iterator[Callable[..., tuple[ScriptedMaster, StepStream]]]:
    """Starts a server with these acts and a stream to it; all acts must have been played at the end."""
    results: list[tuple[Any, ...]] = []

    def start(*acts: Act, wrap: Callable[[Any], Any] = lambda replies: replies) -> tuple[ScriptedMaster, StepStream]:
        """wrap: what becomes of the replies of each connection."""
        master = ScriptedMaster(*acts)
        server = grpc.server(futures.ThreadPoolExecutor(4))
        master_pb2_grpc.add_MasterServicer_to_server(master, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=wire.CHANNEL_OPTIONS)
        run_steps = master_pb2_grpc.MasterStub(channel).RunSteps
        stream = StepStream(lambda requests: wrap(run_steps(requests)), "s", reconnect_s=0.5, retry_pause_s=0.02)
        results.append((master, server, channel, stream))
        return master, stream

    yield start
    for master, server, channel, stream in results:
        stream.close()
        channel.close()
        server.stop(None)
        assert not master._acts, "the script was not played to its end"


def answer(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
    for request in requests:
        value = master_pb2.ReadBack(
            array_id=7, type=common_pb2.ArrayType(element_type="s32"), data=np.int32(request.number).tobytes()
        )
        yield master_pb2.RunStepsReply(number=request.number, values=[value])


def break_after(count: int, *, answered: bool = True) -> Act:
    """Takes `count` steps, answers all of them or all but the last, and loses the connection."""

    def act(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
        for position, request in enumerate(requests, 1):
            if position < count or answered:
                yield master_pb2.RunStepsReply(number=request.number)
            if position == count:
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    return act


def request() -> master_pb2.RunStepsRequest:
    return master_pb2.RunStepsRequest(executable_id="e")


def test_steps_are_numbered_and_their_values_come_back(play: Any) -> None:
    master, stream = play(answer)
    results = [stream.submit(request(), "step") for _ in range(6)]
    for number, result in enumerate(results, 1):
        result.wait()
        assert result.number == number
        assert result.values[7] == number
    assert master.received == [[0, 1, 2, 3, 4, 5, 6]]


def test_what_was_not_answered_is_sent_again_in_order(play: Any) -> None:
    master, stream = play(break_after(2, answered=False), break_after(1, answered=False), answer)
    results = [stream.submit(request(), "step") for _ in range(4)]
    for result in results:
        result.wait()
    assert master.received[0][:3] == [0, 1, 2]
    assert master.received[2] == [0, 2, 3, 4]


def test_an_idle_stream_that_breaks_is_opened_again(play: Any) -> None:
    master, stream = play(break_after(1), answer)
    stream.submit(request(), "step").wait()
    time.sleep(0.3)
    stream.submit(request(), "step").wait()
    assert master.received == [[0, 1], [0, 2]]


def test_only_so_many_steps_run_ahead(play: Any) -> None:
    go = threading.Event()

    def hold(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
        go.wait(10)
        yield from answer(requests, context)

    _, stream = play(hold)
    results = [stream.submit(request(), "step") for _ in range(STEPS_AHEAD)]
    blocked = threading.Thread(target=lambda: results.append(stream.submit(request(), "step")))
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()
    assert not any(result.is_done for result in results)
    go.set()
    blocked.join(10)
    results[-1].wait()


def fail_second(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
    for sent in requests:
        reply = master_pb2.RunStepsReply(number=sent.number)
        if sent.number >= 2:
            reply.error.CopyFrom(wire.error_to_proto(ExecutionError(f"step {sent.number} failed")))
        yield reply


def test_an_error_is_met_at_the_handle_and_then_not_again(play: Any) -> None:
    _, stream = play(fail_second)
    results = [stream.submit(request(), "step") for _ in range(3)]
    results[0].wait()
    with pytest.raises(ExecutionError, match="step 2 failed"):
        results[1].wait()
    with pytest.raises(ExecutionError, match="step 3 failed"):
        results[2].wait()
    assert stream.take_error() is None


def test_an_error_that_nobody_met_is_there_for_the_next_call_once(play: Any) -> None:
    _, stream = play(fail_second)
    results = [stream.submit(request(), "step") for _ in range(3)]
    while not results[2].is_done:
        time.sleep(0.01)
    assert "step 2 failed" in str(stream.take_error())
    assert stream.take_error() is None


def fail_all_alike(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
    for sent in requests:
        reply = master_pb2.RunStepsReply(number=sent.number)
        reply.error.CopyFrom(wire.error_to_proto(ExecutionError("worker 1 was lost")))
        yield reply


def test_an_error_met_at_a_later_step_that_lacked_the_results_is_not_told_again(play: Any) -> None:
    _, stream = play(fail_all_alike)
    results = [stream.submit(request(), "step") for _ in range(3)]
    with pytest.raises(ExecutionError, match="worker 1 was lost"):
        results[2].wait()
    assert stream.take_error() is None


def test_steps_that_fail_of_an_error_after_it_was_told_are_not_told_but_later_ones_are(play: Any) -> None:
    may_fail = threading.Event()

    def fail_the_rest_later(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
        for reply in fail_all_alike(requests, context):
            assert reply.number == 1 or may_fail.wait(10)
            yield reply

    _, stream = play(fail_the_rest_later)
    results = [stream.submit(request(), "step") for _ in range(2)]
    with pytest.raises(ExecutionError):
        results[0].wait()
    assert stream.take_error() is None
    may_fail.set()
    while not results[1].is_done:
        time.sleep(0.01)
    assert stream.take_error() is None
    after = stream.submit(request(), "step")
    while not after.is_done:
        time.sleep(0.01)
    assert "worker 1 was lost" in str(stream.take_error())


def test_an_error_of_the_session_ends_it(play: Any) -> None:
    def refuse(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
        next(requests)
        context.set_trailing_metadata(wire.trailing_error(SessionError("the session expired")))
        context.abort(grpc.StatusCode.NOT_FOUND, "expired")
        yield

    _, stream = play(refuse)
    with pytest.raises(SessionError, match="the session expired"):
        stream.submit(request(), "step").wait()
    with pytest.raises(SessionError, match="the session expired"):
        stream.submit(request(), "step")


def test_a_server_that_stays_away_is_given_up(play: Any) -> None:
    def away(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
        context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        yield

    master, stream = play(*[away] * 100)
    with pytest.raises(ServerUnavailableError, match="away"):
        stream.submit(request(), "step").wait()
    assert len(master.received) > 2
    master._acts.clear()


def test_closing_ends_what_waits(play: Any) -> None:
    held = threading.Event()

    def hold(requests: Requests, context: Any) -> Iterator[master_pb2.RunStepsReply]:
        held.set()
        list(requests)
        yield from ()

    _, stream = play(hold)
    result = stream.submit(request(), "step")
    assert held.wait(10)
    stream.close()
    with pytest.raises(SessionError, match="closed"):
        result.wait()


class ReplyHook:
    """Replies of a connection; `before_each` is called in the thread that receives them."""

    def __init__(self, replies: Any, before_each: Callable[[], None]) -> None:
        self._replies = replies
        self._before_each = before_each

    def __iter__(self) -> Iterator[master_pb2.RunStepsReply]:
        for reply in self._replies:
            self._before_each()
            yield reply

    def cancel(self) -> None:
        self._replies.cancel()

    def initial_metadata(self) -> Any:
        return self._replies.initial_metadata()


def test_a_stream_may_be_closed_by_the_thread_that_receives(play: Any) -> None:
    """The garbage collector runs a session's destructor in whatever thread it happens to be."""
    closed = threading.Event()
    thread: threading.Thread | None = None

    def close() -> None:
        assert threading.current_thread() is thread
        stream.close()
        closed.set()

    _, stream = play(answer, wrap=lambda replies: ReplyHook(replies, close))
    thread = stream._thread
    stream.submit(request(), "step")
    assert closed.wait(10)
    thread.join(10)
    assert not thread.is_alive()
