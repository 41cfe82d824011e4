"""What stands at the border of a manual region says the same when it is written and read again."""

from __future__ import annotations

import pytest

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import parse
from shardwright.planner.graph.imported_shardings import frontend_attributes
from shardwright.regions import Border, border_of, read_border

BORDER = Border(
    enters=True,
    region=3,
    parent=1,
    axes=(("data", 2), ("cp", 4)),
    mesh=(("data", 2), ("model", 2), ("cp", 4)),
    sharding='#sdy.sharding<@mesh, [{"cp", "data", ?}, {"model"}, {}, {?}]>',
)


def test_a_border_is_read_as_it_was_written() -> None:
    assert read_border(BORDER.target, BORDER.attributes) == BORDER
    text = f"""HloModule m
ENTRY e {{
  p = f32[16,8,4,2] parameter(0)
  ROOT c = f32[2,8,4,2] custom-call(p), custom_call_target="{BORDER.target}", {frontend_attributes(BORDER.attributes)}
}}"""
    parameter, call = parse(text).entry.instructions
    assert border_of(call) == BORDER
    assert border_of(parameter) is None


def test_manual_axes_split_dimensions_and_others_do_not() -> None:
    assert BORDER.dims == (("cp", "data"), (), (), ())
    assert BORDER.parts == (8, 1, 1, 1)


def test_a_call_of_the_name_that_says_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match="which region"):
        read_border(BORDER.target, {"shardwright.region": "x"})


def test_other_calls_are_no_border() -> None:
    assert read_border("Sharding", {}) is None
