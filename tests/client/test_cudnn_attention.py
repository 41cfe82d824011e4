"""Attention that a program asks cuDNN for by name, lowered on a machine that has neither cuDNN nor a GPU."""

from __future__ import annotations

import importlib
import json
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.attention import AttentionCall, read_call
from shardwright.client.connection import NodeInfo, SessionInfo
from shardwright.clusters.cluster import ClusterNode
from shardwright.hlo import parse
from shardwright.xla import cudnn_checks
from shardwright.xla.cudnn_checks import AttentionDevice, answer_checks, lowering_for


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def step(q: Any, k: Any, v: Any) -> Any:
    return jax.grad(lambda *qkv: (attention(*qkv).astype(jnp.float32) ** 2).sum(), (0, 1, 2))(q, k, v)


def arguments(width: int = 64) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct((2, 128, heads, width), jnp.bfloat16) for heads in (4, 2, 2))


def calls_of(program: sw.Program) -> list[AttentionCall | None]:
    return [read_call(each) for each in parse(program.hlo_text).instructions() if each.opcode == "custom-call"]


@pytest.mark.parametrize(
    "where",
    [{"platform": "cuda"}, {"platform": "cuda", "hardware": "a100"}, {"platform": "cpu"}, {"platform": "tpu"},
     {"platform": "cuda", "hardware": "v100"}],
)  # fmt: skip
def test_it_is_lowered_for_any_cluster(where: dict[str, str]) -> None:
    forward, backward = calls_of(sw.lower(step, *arguments(), **where))
    assert forward is not None
    assert backward is not None
    assert (forward.backward, backward.backward) == (False, True)
    assert (forward.heads, forward.kv_heads, forward.rows, forward.mask) == (4, 2, 128, "causal")


def test_checks_are_answered_for_the_devices_that_are_named() -> None:
    assert calls_of(sw.lower(step, *arguments(256), platform="cuda", hardware="h200"))
    with pytest.raises(NotImplementedError, match="must be <= 128"):
        sw.lower(step, *arguments(256), platform="cuda", hardware="a100")
    with pytest.raises(sw.OptionError, match="no hardware profile") as refusal:
        sw.lower(step, *arguments(), platform="cuda", hardware="abacus")
    assert refusal.value.where == "hardware"


def test_answers_end_with_the_lowering_and_are_one_threads_own() -> None:
    module = importlib.import_module(cudnn_checks.MODULE)
    original = {name: getattr(module, name) for name in cudnn_checks.CHECKS}
    errors = []

    def ask() -> None:
        try:
            module.check_cudnn_version()
        except RuntimeError as error:
            errors.append(str(error))

    with lowering_for(AttentionDevice(platform="cuda", compute_capability="10.3", cudnn_version="9.10")):
        with answer_checks("cuda"), answer_checks("cuda"):
            assert module.check_cudnn_version() == 91000
            assert module.is_cuda_compute_capability_equal("10.3")
            assert module.check_compute_capability("9.0")
            assert not module.check_compute_capability("12.0")
            other = threading.Thread(target=ask)
            other.start()
            other.join()
        assert {name: getattr(module, name) for name in cudnn_checks.CHECKS} == original
    if module.cuda_versions is None:
        assert errors == ["cuDNN is not detected."]


@pytest.mark.parametrize("device", [AttentionDevice(platform="cpu", compute_capability="9.0"), AttentionDevice(
    platform="cuda", compute_capability="7.0", cudnn_version="9.11")], ids=["cpu", "v100"])  # fmt: skip
def test_libraries_that_choose_by_the_devices_find_no_kernel_where_there_is_none(device: AttentionDevice) -> None:
    module = importlib.import_module(cudnn_checks.MODULE)
    with lowering_for(device), answer_checks(device.platform):
        assert not module.check_compute_capability("8.0")


def test_where_nobody_names_the_devices_the_answer_says_that_it_is_assumed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="shardwright"):
        sw.lower(step, *arguments(), platform="cuda")
        assert "compute capability 9.0 and cuDNN 9.11 are assumed" in caplog.text
        caplog.clear()
        sw.lower(step, *arguments(), platform="cuda", hardware="h100")
        assert "assumed" not in caplog.text


def test_every_name_of_jaxs_is_there() -> None:
    module = importlib.import_module(cudnn_checks.MODULE)
    lowerings = cudnn_checks.LOWERINGS
    assert all(hasattr(module, name) for name in (*cudnn_checks.CHECKS, *lowerings, *lowerings.values()))


def test_a_session_lowers_for_the_devices_of_its_cluster() -> None:
    node = NodeInfo(index=0, data_address="10.0.0.1:7", devices=range(8))
    info = SessionInfo(
        session_id="s", server_version="", cluster_name="", platform="cuda", nodes=(node,), chunk_bytes=1,
        jax_version="", grace_s=1.0, compute_capability="8.0", cudnn_version="9.11",
    )  # fmt: skip
    assert not info.attention_device.is_here
    with lowering_for(info.attention_device), pytest.raises(NotImplementedError, match="must be <= 128"):
        sw.lower(step, *arguments(256), platform="cuda")
    here = replace(info, nodes=(replace(node, data_address="127.0.0.1:7"),))
    assert here.attention_device.is_here


def train_in_8_bits(q: Any, k: Any, v: Any, scale: Any, gradient: Any) -> Any:
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention, fp8_params_keys

    def attend(q: Any, k: Any, v: Any) -> Any:
        scales = dict.fromkeys(fp8_params_keys, scale)
        return dot_product_attention(q, k, v, scale=0.5, use_fp8=True, fp8_params=scales)

    results, pull_back = jax.vjp(attend, q, k, v)
    return results, pull_back((gradient, jnp.zeros_like(scale), jnp.zeros_like(scale)))


def arguments_in_8_bits() -> list[Any]:
    q, *others = [jax.ShapeDtypeStruct((8, 4096, heads, 128), jnp.float8_e4m3fn) for heads in (4, 2, 2)]
    return [q, *others, jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32), q]


def test_attention_in_8_bit_floats_is_read_and_written_as_jax_writes_it() -> None:
    program = sw.lower(train_in_8_bits, *arguments_in_8_bits(), platform="cuda")
    for instruction, call in zip(
        [each for each in parse(program.hlo_text).instructions() if each.opcode == "custom-call"],
        calls_of(program),
        strict=True,
    ):
        assert call is not None
        assert call.is_f8
        assert json.loads(call.backend_config) == json.loads(instruction.get("backend_config"))
        assert call.result_shape == instruction.shape


@pytest.mark.dear
def test_parts_of_attention_in_8_bit_floats_hand_out_the_largest_of_all() -> None:
    program = sw.lower(train_in_8_bits, *arguments_in_8_bits(), platform="cuda")
    pins = {name: {2: "data"} for name in ("q", "k", "v", "gradient")}
    plan = sw.plan(program.hlo_text, cluster_of("h100"), mesh="2", force=pins, cache=False)
    emitted = plan.emit()
    assert emitted.count("stablehlo.maximum") == 6
    assert emitted.count("manual_computation") == 2
    assert "tensor<8x4096x2x128xf8E4M3FN>" in emitted
    assert [each.payload_bytes for each in plan.collectives] == [4] * 6


def test_what_cudnn_alone_computes_is_refused_elsewhere() -> None:
    with pytest.raises(sw.UnsupportedProgramError, match=r"'cpu' devices for attention that cuDNN alone") as refusal:
        sw.lower(train_in_8_bits, *arguments_in_8_bits())
    assert "test_cudnn_attention.py" in refusal.value.where
    program = sw.lower(train_in_8_bits, *arguments_in_8_bits(), platform="cuda")
    with pytest.raises(sw.UnsupportedProgramError, match="from Hopper on"):
        sw.plan(program.hlo_text, cluster_of("a100"), mesh="2", cache=False).emit()


def cluster_of(hardware: str) -> sw.Cluster:
    node = ClusterNode(index=0, ip="127.0.0.1", port=1, device_count=2)
    return sw.Cluster(name="test", nodes=(node,), hardware=hardware)


@pytest.mark.dear
@pytest.mark.parametrize("hardware", ["a100", "v100"])
def test_devices_without_the_kernel_run_it_written_out_and_the_plan_says_so(hardware: str) -> None:
    program = sw.lower(step, *arguments(), platform="cuda", hardware=hardware)
    plan = sw.plan(program.hlo_text, cluster_of(hardware), mesh="2", cache=False)
    is_written_out = hardware == "v100"
    assert ("__cudnn$fmha" in plan.emit()) != is_written_out
    note = "attention: 2 calls run written out, 'v100' devices have no fused kernel of it"
    assert (note in plan.notes) == is_written_out
