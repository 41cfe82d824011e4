"""What goes over the wire comes back the same; what cannot is refused by one of our errors."""

from __future__ import annotations

import gzip
from concurrent import futures

import grpc
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.errors import (
    ERRORS_BY_CODE,
    ArrayError,
    AuthenticationError,
    DeadlineError,
    HloSyntaxError,
    InternalError,
    OptionError,
    ResourceLimitError,
    ServerUnavailableError,
    ShardwrightError,
)
from shardwright.options.plan_options import FORCED_STRATEGIES, PlanOptions
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import common_pb2, master_pb2, master_pb2_grpc
from shardwright.protocol import plan_messages, wire
from shardwright.xla.compiled import CompiledMemory, CompiledProgram, ObservedCollective

names = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
axes = st.lists(names, max_size=3, unique=True).map(tuple)
pins = st.one_of(st.none(), st.just(True), names, st.lists(names, min_size=2, max_size=3, unique=True).map(tuple))


def test_layouts_come_back() -> None:
    layout = Layout(
        element_type="bf16",
        shape=(5, 7, 3),
        mesh=Mesh.of({"data": 2, "model": 4}),
        sharding=TensorSharding((("data",), ("model",), ())),
        stored_shape=(6, 8, 3),
    )
    assert wire.layout_from_proto(wire.layout_to_proto(layout)) == layout


@given(
    st.one_of(st.none(), st.dictionaries(names, st.integers(1, 64), min_size=1)),
    st.one_of(
        st.none(),
        st.sampled_from(FORCED_STRATEGIES),
        st.dictionaries(
            st.text(min_size=1),
            st.one_of(st.just("replicated"), st.dictionaries(st.integers(0, 5), pins, min_size=1)),
            min_size=1,
        ),
    ),
    st.dictionaries(st.integers(0, 9), st.lists(axes, max_size=3).map(tuple)),
    st.lists(st.text()).map(tuple),
)
def test_plan_options_come_back(mesh: object, force: object, layouts: object, argument_names: tuple[str, ...]) -> None:
    assume(mesh is not None or force != "axes")  # whose names say what each does
    options = PlanOptions(mesh=mesh, force=force, argument_axes=layouts, argument_names=argument_names)  # type: ignore[arg-type]
    request = plan_messages.plan_request(options, session_id="s", program_id="p")
    assert plan_messages.plan_options(master_pb2.PlanProgramRequest.FromString(request.SerializeToString())) == options


@pytest.mark.parametrize(
    "limits",
    [
        {"memory_budget": 1 << 40, "deadline_s": 0.5},
        {"micro_batches": 4, "micro_batch_inexact": True},
        {"stages": 2, "schedule": "2f2b", "imbalance": 0.0},
        {"memory_fraction": 0.25, "effort": "best", "rewrites": "none", "remat": "full", "mode": "propagate"},
        {"expert_capacity": 1.25},
        {"constraints": "ignore", "fused_attention": "off", "offload": "optimizer", "simple": False},
        {"bucket_bytes": 0},
        {"bucket_bytes": 25_000_000},
        {"local_arguments": (0, 3)},
        {"force": {}, "rest": "replicated"},
        {"force": {"w": "replicated"}, "rest": "data"},
    ],
)
def test_limits_of_a_plan_come_back(limits: dict[str, object]) -> None:
    options = PlanOptions(**limits)  # type: ignore[arg-type]
    request = plan_messages.plan_request(options, session_id="s", program_id="p")
    assert plan_messages.plan_options(master_pb2.PlanProgramRequest.FromString(request.SerializeToString())) == options


def test_progress_comes_back() -> None:
    progress = PlanProgress(phase="search", detail="data=8", incumbent_s=0.5, lower_bound_s=0.4, elapsed_s=1.5)
    assert plan_messages.plan_progress_from_proto(plan_messages.plan_progress_to_proto(progress)) == progress
    assert progress.gap == pytest.approx(0.2)
    assert str(progress) == "2 s  search  data=8  best step 500 ms  bound 400 ms  gap 20.0%"


@pytest.mark.parametrize(
    "wrong",
    [
        {"forced_strategy": "magic"},
        {"forced_strategy": "data", "forced_pins": [{}]},
        {"effort": "much"},
        {"mode": "guess"},
        {"micro_batches": -1},
        {"imbalance": -0.1},
        {"rewrites": "some"},
        {"remat": "some"},
        {"memory_budget_bytes": -1},
        {"memory_fraction": 2.0},
        {"memory_budget_bytes": 1, "memory_fraction": 0.5},
        {"deadline_s": -1.0},
        {"mode": "propagate", "forced_strategy": "data"},
        {"rest": "data", "forced_strategy": "data"},
        {"rest": "some"},
        {"bucket_bytes": -1},
        {"expert_capacity": 0.5},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        plan_messages.plan_options(master_pb2.PlanProgramRequest(**wrong))


def test_load_results_come_back() -> None:
    collective = ObservedCollective(
        kind="all-reduce", payload_bytes=8, wire_bytes=12, group_size=4, group_count=2, count=3,
        trip_counts_known=True, groups="{{0,1}}", instruction="all-reduce.1", op_name="dot.3",
    )  # fmt: skip
    memory = CompiledMemory(argument_bytes=1, output_bytes=2, alias_bytes=3, temporary_bytes=4)
    program = CompiledProgram(
        stablehlo="", partitioned_gzip=b"", serialized=None, collectives=(collective,), memory=memory, emit_s=0.5,
        compile_s=1.5,
    )  # fmt: skip
    result = plan_messages.load_result("id", program)
    assert plan_messages.collectives_from_result(result) == (collective,)
    assert (result.arguments_bytes, result.outputs_bytes, result.aliased_bytes, result.temporaries_bytes) == (
        1,
        2,
        3,
        4,
    )
    assert (result.executable_id, result.compile_s) == ("id", 2.0)


# ---- chunks ------------------------------------------------------------------
@given(st.binary(max_size=50), st.integers(1, 9))
def test_chunks_join_to_the_whole(data: bytes, size: int) -> None:
    pieces = list(wire.chunks(data, size))
    assert b"".join(pieces) == data
    assert all(len(piece) <= size for piece in pieces)
    assert pieces, "an upload of nothing is still one message"


@given(st.text(), st.integers(1, 9))
def test_text_comes_back_from_chunks(text: str, size: int) -> None:
    unpacker = wire.TextUnpacker("text", 1000)
    for chunk in wire.chunks(wire.compress_text(text), size):
        unpacker.feed(chunk)
    assert unpacker.text() == text


def test_a_bomb_is_stopped_at_the_limit() -> None:
    unpacker = wire.TextUnpacker("text", 1 << 20)
    with pytest.raises(ResourceLimitError, match="limit of 1 MiB"):
        unpacker.feed(wire.compress_text("0" * (100 << 20)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HloModule", "not gzip"),
        (gzip.compress(b"HloModule")[:-4], "ends early"),
        (gzip.compress(b"\xff\xfe"), "not UTF-8"),
    ],
    ids=["no-gzip", "cut", "no-text"],
)
def test_broken_text_is_refused(data: bytes, message: str) -> None:
    def unpack() -> str:
        unpacker = wire.TextUnpacker("text", 1000)
        unpacker.feed(data)
        return unpacker.text()

    with pytest.raises(HloSyntaxError, match=message):
        unpack()


# ---- errors ------------------------------------------------------------------
@pytest.mark.parametrize("cls", ERRORS_BY_CODE.values())
def test_every_error_comes_back_as_its_class(cls: type[ShardwrightError]) -> None:
    error = cls("what", where="where", remedy="remedy")
    back = wire.error_from_proto(wire.error_to_proto(error))
    assert type(back) is cls
    assert str(back) == str(error)


def test_an_unknown_code_of_a_newer_server_is_still_ours() -> None:
    back = wire.error_from_proto(common_pb2.Error(code="from_the_future", message="m"))
    assert type(back) is ShardwrightError


class _Failing(master_pb2_grpc.MasterServicer):
    """Fails as a request's session_id says: with our error, with a bare status, or not at all in time."""

    def CloseSession(
        self, request: master_pb2.CloseSessionRequest, context: grpc.ServicerContext
    ) -> master_pb2.CloseSessionReply:
        if request.session_id in ERRORS_BY_CODE:
            error = ERRORS_BY_CODE[request.session_id]("ümläut " * 2000, where="w", remedy="r")
            context.set_trailing_metadata(wire.trailing_error(error))
            context.abort(wire.status_of(error), "details")
        if request.session_id == "slow":
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "slow")
        if request.session_id == "token":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")
        raise ValueError("a defect")


@pytest.fixture(scope="module")
def failing() -> object:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    master_pb2_grpc.add_MasterServicer_to_server(_Failing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield master_pb2_grpc.MasterStub(channel)
    server.stop(None)


def _error_of(stub: object, session_id: str) -> ShardwrightError:
    def call() -> None:
        try:
            stub.CloseSession(master_pb2.CloseSessionRequest(session_id=session_id))  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            wire.raise_from_rpc(error, where="somewhere")

    with pytest.raises(ShardwrightError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
def test_errors_cross_a_real_call(failing: object, code: str) -> None:
    error = _error_of(failing, code)
    assert (error.code, error.where, error.remedy) == (code, "w", "r")
    assert error.message.startswith("ümläut")


@pytest.mark.parametrize(
    ("session_id", "cls"), [("slow", DeadlineError), ("token", AuthenticationError), ("defect", InternalError)]
)
def test_bare_statuses_become_our_errors(failing: object, session_id: str, cls: type[ShardwrightError]) -> None:
    error = _error_of(failing, session_id)
    assert type(error) is cls
    assert error.where == "somewhere"


def test_no_server_is_our_error() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        error = _error_of(master_pb2_grpc.MasterStub(channel), "x")
    assert isinstance(error, ServerUnavailableError)
    assert error.remedy


def test_every_code_of_the_table_exists() -> None:
    assert set(wire.STATUS_BY_CODE) <= set(ERRORS_BY_CODE)
    assert wire.status_of(ArrayError("x")) is grpc.StatusCode.NOT_FOUND
