"""Batch normalization taken apart: XLA's numbers, and no array that is gathered."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.rewrites.batch_norm import expand_batch_norms
from shardwright.plans.plan import Plan
from shardwright.user_plans import compile_and_prove
from tests.planner.rewrites.rewrite_programs import run

FEATURES, EPSILON = 5, 0.125
FEATURE = f"f32[{FEATURES}]"


def normalization(kind: str, array: str, feature: int) -> str:
    """A normalization of `array` (a shape), its arguments those of the program."""
    count = {"training": 3, "inference": 5, "grad": 5}[kind]
    shapes = [array, *[FEATURE] * (count - 1)]
    if kind == "grad":
        shapes[-1] = array
    result = array if kind == "inference" else f"({array}, {FEATURE}, {FEATURE})"
    parameters = "\n".join(f"  p{i} = {shape} parameter({i})" for i, shape in enumerate(shapes))
    operands = ", ".join(f"p{i}" for i in range(count))
    return f"""HloModule normalization

ENTRY main {{
{parameters}
  ROOT normalized = {result} batch-norm-{kind}({operands}), epsilon={EPSILON}, feature_index={feature}
}}
"""


@pytest.mark.parametrize("kind", ["training", "inference", "grad"])
@pytest.mark.parametrize(("dims", "feature"), [((4, 3, 2, FEATURES), 3), ((4, FEATURES, 3), 1), ((FEATURES, 6), 0)])
def test_numbers_are_those_of_xla(kind: str, dims: tuple[int, ...], feature: int) -> None:
    text = normalization(kind, f"f32[{','.join(map(str, dims))}]", feature)
    module = expand_batch_norms(parse(text))
    assert not [each for each in module.instructions() if each.opcode.startswith("batch-norm")]
    random = np.random.default_rng(0)
    shapes = [parameter.shape.leaves[0].dimensions for parameter in module.entry.parameters]
    values = [random.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes]  # variances are positive
    for expected, item in zip(run(text, values), run(module.to_text(), values), strict=True):
        np.testing.assert_allclose(item, expected, rtol=1e-5, atol=1e-5)


def test_what_stood_there_keeps_its_name_and_line() -> None:
    for kind in ("training", "inference"):
        before = parse(normalization(kind, f"f32[4,{FEATURES}]", 1)).entry.root
        after = expand_batch_norms(parse(normalization(kind, f"f32[4,{FEATURES}]", 1))).entry.root
        assert (after.name, after.shape, after.line) == (before.name, before.shape, before.line)
        assert "epsilon" not in after.attributes


def test_mixed_types_stay() -> None:
    text = normalization("training", f"bf16[4,{FEATURES}]", 1)
    module = parse(text)
    assert expand_batch_norms(module) is module


@pytest.mark.dear
@pytest.mark.parametrize("kind", ["training", "grad"])
def test_a_split_batch_is_summed_by_feature(kind: str) -> None:
    text = normalization(kind, f"f32[4096,{FEATURES},512]", 1)
    batch = (("data",), (), ())
    arrays = {0: batch, **({4: batch} if kind == "grad" else {})}
    options = PlanOptions(mesh={"data": 8}, argument_axes=arrays)
    planned = plan(text, Cluster.local(8), options)
    assert isinstance(planned, Plan)
    assert {each.kind for each in planned.collectives} == {"all-reduce"}
    assert max(each.payload_bytes for each in planned.collectives) <= 2 * 4 * FEATURES
    proof = compile_and_prove(planned)
    assert proof.holds, proof.explain()
