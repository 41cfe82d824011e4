"""Variables that are stored in another view than the user's program has: values, JSON, messages."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from shardwright.errors import PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout, distinct_shards, logical_part, pad_to_stored
from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode
from shardwright.plans.plan_text import plan_to_json
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.protocol import plan_messages, wire
from tests.plans.test_plans import HLO, small_plan

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "plan-schema.json").read_text(encoding="utf-8"))

#: [5, 12] stored as [5, 3, 4], the first dimension padded to 6, the last split.
LAYOUT = Layout(
    element_type="f32",
    shape=(5, 3, 4),
    mesh=Mesh.of({"data": 2, "model": 2}),
    sharding=TensorSharding((("data",), (), ("model",))),
    stored_shape=(6, 3, 4),
    view_of=(5, 12),
)


def viewed_plan() -> Plan:
    """A plan whose argument and output `[3, 4]` are a view of `[2, 6]`."""
    plan = small_plan()
    (parameter,), (output,) = plan.parameters, plan.outputs
    return replace(
        plan,
        parameters=(replace(parameter, view_of=(2, 6)),),
        outputs=(replace(output, view_of=(2, 6)),),
        original_sha256=sha256(b"the user's program").hexdigest(),
        hlo_text=HLO,
    )


def test_array_comes_back_from_the_shards_of_a_view() -> None:
    array = np.arange(60, dtype=np.float32).reshape(5, 12)
    stored = pad_to_stored(array, LAYOUT)
    assert stored.shape == (6, 3, 4)
    assert LAYOUT.user_shape == (5, 12)
    whole = np.empty(LAYOUT.stored_shape, np.float32)
    for shard in distinct_shards(LAYOUT, range(4)):
        # Each device has its half of all three blocks: what makes the view worth having.
        assert shard.slices[1:] in [(slice(0, 3), slice(0, 2)), (slice(0, 3), slice(2, 4))]
        whole[shard.slices] = stored[shard.slices]
    np.testing.assert_array_equal(logical_part(whole, LAYOUT), array)


def test_layout_of_other_elements_is_refused() -> None:
    with pytest.raises(PlanError, match="no view of"):
        replace(LAYOUT, view_of=(5, 13))


def test_layouts_and_pins_come_back_over_the_wire() -> None:
    assert wire.layout_from_proto(wire.layout_to_proto(LAYOUT)) == LAYOUT
    options = PlanOptions(
        mesh={"data": 2, "model": 2},
        argument_axes={0: LAYOUT.sharding.dims, 3: ((),)},
        argument_views={0: LAYOUT.shape},
        output_axes={1: LAYOUT.sharding.dims},
        output_views={1: LAYOUT.shape},
    )
    assert plan_messages.plan_options(plan_messages.plan_request(options, session_id="s", program_id="p")) == options


def test_plan_of_a_rewritten_program_carries_its_text() -> None:
    plan = viewed_plan()
    text = plan_to_json(plan)
    jsonschema.validate(json.loads(text), SCHEMA)
    for given in (None, "the user's program", HLO):
        result = decode(text, hlo_text=given)
        assert result == plan
        assert result.require_hlo() == HLO
    with pytest.raises(PlanError, match="not the program this plan was made for"):
        decode(text, hlo_text="another program")


def test_plan_without_the_rewritten_text_says_so() -> None:
    text = plan_to_json(replace(viewed_plan(), hlo_text=None))
    assert decode(text, hlo_text=HLO).require_hlo() == HLO
    with pytest.raises(PlanError, match="without its HLO text"):
        decode(text, hlo_text="the user's program").require_hlo()


@pytest.mark.parametrize(
    "packed",
    ["?", base64.b64encode(b"no gzip").decode(), base64.b64encode(gzip.compress(b"another"))[:-8].decode(),
     base64.b64encode(gzip.compress(b"another")).decode()],
    ids=["no base64", "no gzip", "cut short", "another text"],
)  # fmt: skip
def test_wrong_text_in_a_plan_is_named(packed: str) -> None:
    data = json.loads(plan_to_json(viewed_plan()))
    data["rewritten"]["hlo_gzip_base64"] = packed
    with pytest.raises(PlanError) as caught:
        decode(json.dumps(data))
    assert caught.value.where == "plan.rewritten.hlo_gzip_base64"


def test_wrong_view_in_a_plan_is_named() -> None:
    data = json.loads(plan_to_json(viewed_plan()))
    data["outputs"][0]["view_of"] = [2, 7]
    with pytest.raises(PlanError, match="no view of") as caught:
        decode(json.dumps(data))
    assert caught.value.where == "plan.outputs[0]"


def unpadded(step_plan: Plan) -> Plan:
    parameters, outputs = (
        tuple(replace(v, stored_shape=v.shape) for v in each) for each in (step_plan.parameters, step_plan.outputs)
    )
    return replace(step_plan, parameters=parameters, outputs=outputs)


def test_plan_with_views_is_not_portable() -> None:
    assert unpadded(small_plan()).portable
    assert not unpadded(viewed_plan()).portable
    with pytest.raises(PlanError, match=r"x is stored as \[3, 4\], not as \[2, 6\]") as caught:
        unpadded(viewed_plan()).require_portable()
    assert 'rewrites="none"' in caught.value.remedy


def test_plan_with_padded_variables_is_not_portable() -> None:
    assert not small_plan().portable
    with pytest.raises(
        PlanError, match=r"is stored as \[4, 4\]: jax\.jit takes no arrays that their axes do not divide"
    ):
        small_plan().require_portable()
