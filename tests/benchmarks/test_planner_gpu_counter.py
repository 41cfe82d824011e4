"""The counter on what XLA:GPU compiled: small steps of the benchmark, and lines whose sums are done by hand.

The texts in `optimized/` are those that `python -m benchmarks.planner.gpu_judged --text FILE` keeps, without metadata;
nothing here needs the compiler for GPUs.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import jax
import pytest

from benchmarks.planner.beside import measure_overlap
from benchmarks.planner.counter import count
from benchmarks.planner.experts.plans import build_experts
from benchmarks.planner.experts.rules import lower
from benchmarks.planner.judge import MACHINES, judge
from benchmarks.planner.partitioned_text import CountingError
from workloads.every_model import EVERY_MODEL

#: text → model, size, expert, changes.
STEPS = {
    "gpt2-zero1": (
        "gpt2", "124M", "zero1",
        {"layers": 1, "width": 64, "heads": 4, "context": 16, "vocabulary": 65},
    ),
    "llama-zero3": (
        "llama", "1B", "zero3",
        {"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "vocabulary": 96, "context": 16},
    ),
    "resnet-zero1": (
        "resnet", "250M", "zero1",
        {"channels": 32, "width_factor": 1, "blocks": (1, 1, 0, 0), "image": 32, "classes": 16, "batch_per_device": 1},
    ),
    "lstm-tensor2-h100": (
        "lstm", "1024", "tensor2",
        {"layers": 1, "width": 64, "vocabulary": 64, "length": 8, "batch_per_device": 2},
    ),
}  # fmt: skip


def text_of(name):
    return gzip.decompress((Path(__file__).parent / "optimized" / f"{name}.hlo.gz").read_bytes()).decode()


@pytest.mark.dear
@pytest.mark.parametrize("name", STEPS)
def test_products_are_those_of_the_step_that_xla_compiles_for_hosts(name):
    """Up to the borders of convolutions, which XLA:GPU writes out where they are not even."""
    model, size, expert, changes = STEPS[name]
    layout = build_experts(EVERY_MODEL[model], 8)[expert]
    case = EVERY_MODEL[model].build(size, 8, **{**changes, **layout.changes})
    here = count(lower(case, layout, jax.devices()).compile().as_text(), 8)
    tolerance = 0.05 if model == "resnet" else 0.01
    assert count(text_of(name), 8).product_flops == pytest.approx(here.product_flops, rel=tolerance)


def test_zero1_issues_combined_collectives():
    """52 gradients leave in one reduce-scatter, and the loss in an all-reduce; the padded table goes apart."""
    result = count(text_of("gpt2-zero1"), 8).wire_by_kind()
    model, size, _, changes = STEPS["gpt2-zero1"]
    parameters = EVERY_MODEL[model].build(size, 8, **changes).parameter_count * 4
    assert {kind: runs for kind, (runs, _) in result.items()} == {
        "all-gather": 2, "all-reduce": 1, "all-to-all": 1, "reduce-scatter": 1,
    }  # fmt: skip
    assert result["reduce-scatter"][1] == pytest.approx(7 / 8 * parameters, rel=0.02)
    assert result["all-gather"][1] == pytest.approx(7 / 8 * parameters, rel=0.02)


def test_collectives_in_loops_run_with_their_trips():
    """Three scanned layers gather their weights on the way there and back, and scatter their gradients."""
    collectives = count(text_of("llama-zero3"), 8).collectives
    in_loops = [(each.kind, each.count) for each in collectives if each.count % 3 == 0]
    assert in_loops == [("all-gather", 6), ("reduce-scatter", 3), ("reduce-scatter", 3)]
    assert not [each for each in collectives if each.count > 6]


# ---- lines by hand -------------------------------------------------------
ADD = """%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}
"""


def count_all(entry, computations="", devices=8):
    return count(f"HloModule m\n\n{ADD}\n{computations}\nENTRY %main () -> f32[] {{\n{entry}}}\n", devices)


@pytest.mark.parametrize(
    ("line", "kind", "payload"),
    [
        ("f32[64]{0} all-reduce(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", "all-reduce", 256),
        ("(f32[64]{0}, f32[32]{0}) all-reduce(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 384),
        ("f32[64]{0} all-reduce-start(%a), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 256),
        (
            ("((f32[64]{0}, f32[32]{0}), (f32[256]{0}, f32[128]{0})) all-gather-start(%a, %b), "
            "replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}"),
            "all-gather", 4 * 384,
        ),
        ("((f32[64]{0}), f32[16]{0}) async-start(%a), calls=%wrapped", "reduce-scatter", 256),
        (
            "(f32[64]{0}, f32[64]{0}) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}",
            "collective-permute", 256,
        ),
    ],
    ids=["synchronous", "combined", "started", "combined and started", "wrapped", "permuted"],
)  # fmt: skip
def test_a_collective_in_every_form_is_one(line, kind, payload):
    wrapped = """%wrapped (w: f32[64]) -> f32[16] {
  %w = f32[64]{0} parameter(0)
  ROOT %r = f32[16]{0} reduce-scatter(%w), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}
"""
    operands = "  %a = f32[64]{0} parameter(0)\n  %b = f32[32]{0} parameter(1)\n"
    (collective,) = count_all(f"{operands}  ROOT %c = {line}\n", wrapped).collectives
    assert (collective.kind, collective.payload_bytes, collective.count) == (kind, payload, 1)
    assert collective.groups == (((0, 1), (1, 0)) if "permute" in kind else ((0, 1, 2, 3), (4, 5, 6, 7)))


def test_collectives_of_one_device_and_ends_of_started_ones_are_free():
    entry = """  %a = f32[64]{0} parameter(0)
  %one = f32[64]{0} all-reduce(%a), replica_groups=[8,1]<=[8], to_apply=%add
  %own = f32[64]{0} collective-permute(%one), source_target_pairs={{0,0},{1,1}}
  ROOT %done = f32[64]{0} all-reduce-done(%own)
"""
    result = count_all(entry)
    assert (result.collectives, result.kernels) == ((), ())


FUSIONS = {
    "a slice reads what it gives": (
        """
  %x = f32[1024,8]{1,0} parameter(0)
  %y = f32[2,8]{1,0} slice(%x), slice={[0:2], [0:8]}
  ROOT %n = f32[2,8]{1,0} negate(%y)
""",
        (16 + 16) * 4,
    ),
    "a gather reads rows and their numbers": (
        """
  %x = f32[1024,8]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  ROOT %g = f32[4,8]{1,0} gather(%x, %i), offset_dims={1}, slice_sizes={1,8}
""",
        4 * 4 + (32 + 32) * 4,
    ),
    "a parameter with two readers is read once": (
        """
  %x = f32[64]{0} parameter(0)
  %t = f32[64]{0} tanh(%x)
  ROOT %m = f32[64]{0} multiply(%x, %t)
""",
        2 * 256,
    ),
    "two slices of one parameter": (
        """
  %x = f32[64]{0} parameter(0)
  %s = f32[8]{0} slice(%x), slice={[0:8]}
  %t = f32[8]{0} slice(%x), slice={[8:16]}
  ROOT %m = f32[8]{0} add(%s, %t)
""",
        (16 + 8) * 4,
    ),
    "all results are written": (
        """
  %x = f32[64]{0} parameter(0)
  %t = f32[64]{0} tanh(%x)
  %c = bf16[64]{0} convert(%x)
  ROOT %o = (f32[64]{0}, bf16[64]{0}) tuple(%t, %c)
""",
        256 + 256 + 128,
    ),
    "a reduction reads all and writes little": (
        """
  %x = f32[64,32]{1,0} parameter(0)
  %z = f32[] constant(0)
  ROOT %r = f32[64]{0} reduce(%x, %z), dimensions={1}, to_apply=%add
""",
        64 * 32 * 4 + 64 * 4,
    ),
    "zeros are written only": (
        """
  %z = f32[] constant(0)
  ROOT %b = f32[64]{0} broadcast(%z), dimensions={}
""",
        256,
    ),
    "an update in place moves the update": (
        """
  %x = f32[1024,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %n = f32[1,8]{1,0} negate(%u)
  ROOT %d = f32[1024,8]{1,0} dynamic-update-slice(%x, %n, %i, %z)
""",
        (8 + 8) * 4 + 4,
    ),
    "an update of zeros is written whole": (
        """
  %u = f32[1,8]{1,0} parameter(0)
  %z = s32[] constant(0)
  %f = f32[] constant(0)
  %x = f32[1024,8]{1,0} broadcast(%f), dimensions={}
  ROOT %d = f32[1024,8]{1,0} dynamic-update-slice(%x, %u, %z, %z)
""",
        (8 + 1024 * 8) * 4,
    ),
    "a scatter reads, combines and writes its rows": (
        """
  %x = f32[1024,8]{1,0} parameter(0)
  %i = s32[4,1]{1,0} parameter(1)
  %u = f32[4,8]{1,0} parameter(2)
  ROOT %s = f32[1024,8]{1,0} scatter(%x, %i, %u), update_window_dims={1}, to_apply=%add
""",
        4 * 4 + 3 * 32 * 4,
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_bytes_of_a_fused_kernel(name):
    inside, expected = FUSIONS[name]
    entry = "  ROOT %f = f32[] fusion(), kind=kLoop, calls=%inner\n"
    (kernel,) = count_all(entry, f"%inner () -> f32[] {{\n{inside}}}\n").kernels
    assert (kernel.bytes, kernel.product_type) == (expected, None)


GEMM = '"gemm_backend_config":{{"beta":{beta},"dot_dimension_numbers":{{"lhs_contracting_dimensions":["{dim}"]}}}}'


@pytest.mark.parametrize(
    ("line", "flops", "moved"),
    [
        (  # a bias is read, the workspace is not written
            ('(f32[16,4]{1,0}, s8[4194304]{0}) custom-call(%a, %b, %bias), custom_call_target="__cublas$lt$matmul", '
            f"backend_config={{{GEMM.format(beta=0, dim=1)}}}"),
            2 * 16 * 4 * 8, (16 * 8 + 8 * 4 + 4 + 16 * 4) * 4,
        ),
        (  # added to another array
            ('f32[16,4]{1,0} custom-call(%a, %b, %c), custom_call_target="__cublas$gemm", '
            f"backend_config={{{GEMM.format(beta=1, dim=1)}}}"),
            2 * 16 * 4 * 8, (16 * 8 + 8 * 4 + 2 * 16 * 4) * 4,
        ),
        (  # batched
            ('(f32[3,16,16]{2,1,0}, s8[64]{0}) custom-call(%q, %k), custom_call_target="__cublas$lt$matmul", '
            f"backend_config={{{GEMM.format(beta=0, dim=2)}}}"),
            2 * 3 * 16 * 16 * 8, (2 * 3 * 16 * 8 + 3 * 16 * 16) * 4,
        ),
        (  # the gradient of a filter: every tap of every output, but those on the padding
            ('(f32[5,6,3,3]{3,2,1,0}, u8[1024]{0}) custom-call(%image, %gradient), window={size=3x3 pad=1_1x1_1}, '
            'dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convBackwardFilter"'),
            2 * 2 * 5 * 6 * 10 * 10, (2 * 6 * 16 + 2 * 5 * 16 + 5 * 6 * 9) * 4,
        ),
        (  # no product: by its bytes
            '(f32[16,4]{1,0}, s32[1]{0}) custom-call(%c), custom_call_target="cusolver_potrf_ffi"',
            0, (2 * 16 * 4 + 1) * 4,
        ),
    ],
    ids=["bias", "added", "batched", "filter", "solver"],
)  # fmt: skip
def test_calls_of_libraries(line, flops, moved):
    shapes = {
        "a": "16,8", "b": "8,4", "bias": "4", "c": "16,4", "q": "3,16,8", "k": "3,16,8", "image": "2,6,4,4",
        "gradient": "2,5,4,4",
    }  # fmt: skip
    operands = "".join(f"  %{name} = f32[{shape}] parameter({n})\n" for n, (name, shape) in enumerate(shapes.items()))
    (kernel,) = count_all(f"{operands}  ROOT %call = {line}\n").kernels
    assert (kernel.flops, kernel.bytes) == (flops, moved)
    assert kernel.product_type == ("f32" if flops else None)


def test_an_unknown_product_is_refused():
    line = '(f32[8]{0}, u8[0]{0}) custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"'
    with pytest.raises(CountingError, match="fmhaSoftmax"):
        count_all(f"  %a = f32[8]{{0}} parameter(0)\n  ROOT %call = {line}\n")


SUM = "all-reduce%s(%%a), replica_groups=[1,8]<=[8], to_apply=%%add"
SMALL, LARGE = (f"  %{name} = f32[{size}]{{0}} copy(%{name}0)\n" for name, size in (("s", 64), ("l", 1 << 28)))
GIVEN = "  %s0 = f32[64]{0} parameter(0)\n  %l0 = f32[268435456]{0} parameter(1)\n  %a = f32[1048576]{0} parameter(2)\n"


STARTED, DONE = f"  %r = f32[1048576]{{0}} {SUM % '-start'}\n", "  %d = f32[1048576]{0} all-reduce-done(%r)\n"


@pytest.mark.parametrize(
    ("lines", "hides"),
    [
        (f"  %r = f32[1048576]{{0}} {SUM % ''}\n{LARGE}", "nothing"),
        (STARTED + DONE + LARGE, "nothing"),
        (STARTED + LARGE + DONE, "all"),
        (STARTED + SMALL + DONE, "a kernel"),
    ],
    ids=["synchronous", "done at once", "behind much", "behind little"],
)
def test_kernels_wait_for_what_is_left_where_a_collective_is_done(lines, hides):
    machine = MACHINES["a100"]
    text = f"HloModule m\n\n{ADD}\nENTRY %main () -> f32[] {{\n{GIVEN}{lines}}}\n"
    whole, result = judge(count(text, 8), machine), measure_overlap(text, 8, machine)
    assert result.compute_s == pytest.approx(whole.compute_s)
    assert result.communication_s == pytest.approx(whole.communication_s)
    hidden_s = {"nothing": 0.0, "all": whole.communication_s, "a kernel": machine.launch_s}[hides]
    assert result.communication_s - result.exposed_s == pytest.approx(hidden_s, abs=1e-12)
