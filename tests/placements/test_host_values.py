"""What of a module lies on the host, held against what XLA:GPU's layouts say of such programs."""

from __future__ import annotations

import pytest

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import parse
from shardwright.placements import (
    drop_torn_aliases,
    find_host_values,
    mark_host_values,
    place_results,
    read_boundary,
)

_TO_HOST = (
    'custom_call_target="annotate_device_placement", custom_call_has_side_effect=true, '
    'frontend_attributes={_xla_buffer_placement="pinned_host"}'
)
_TO_DEVICE = _TO_HOST.replace("pinned_host", "device")

_STATE = f"""HloModule step, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}
ENTRY main {{
  m = f32[8,4] parameter(0)
  x = f32[8,4] parameter(1)
  there = f32[8,4] custom-call(m), {_TO_DEVICE}
  new = f32[8,4] add(there, x)
  back = f32[8,4] custom-call(new), {_TO_HOST}
  ROOT out = (f32[8,4], f32[8,4]) tuple(back, new)
}}
"""

#: Residuals of a scan, as JAX writes them under a policy that offloads.
_STACKED = f"""HloModule scan
body {{
  carried = (s32[], f32[4], f32[3,4]) parameter(0)
  i = s32[] get-tuple-element(carried), index=0
  h = f32[4] get-tuple-element(carried), index=1
  stack = f32[3,4] get-tuple-element(carried), index=2
  one = s32[] constant(1)
  zero = s32[] constant(0)
  next = s32[] add(i, one)
  twice = f32[4] add(h, h)
  row = f32[1,4] reshape(twice)
  kept = f32[1,4] custom-call(row), {_TO_HOST}
  grown = f32[3,4] dynamic-update-slice(stack, kept, i, zero)
  ROOT out = (s32[], f32[4], f32[3,4]) tuple(next, twice, grown)
}}
condition {{
  carried.1 = (s32[], f32[4], f32[3,4]) parameter(0)
  i.1 = s32[] get-tuple-element(carried.1), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(i.1, three), direction=LT
}}
ENTRY main {{
  x = f32[4] parameter(0)
  none = s32[] constant(0)
  nothing = f32[] constant(0)
  empty = f32[3,4] broadcast(nothing), dimensions={{}}
  start = (s32[], f32[4], f32[3,4]) tuple(none, x, empty)
  loop = (s32[], f32[4], f32[3,4]) while(start), condition=condition, body=body
  rows = f32[3,4] get-tuple-element(loop), index=2
  last = f32[1,4] dynamic-slice(rows, none, none), dynamic_slice_sizes={{1,4}}
  here = f32[1,4] custom-call(last), {_TO_DEVICE}
  ROOT sum = f32[1,4] add(here, here)
}}
"""


def _names(text: str) -> set[str]:
    return {instruction.name for instruction, _ in find_host_values(parse(text)).values}


def test_state_that_comes_back_lies_on_the_host() -> None:
    found = find_host_values(parse(_STATE))
    assert found.arguments == {0}
    assert found.results == {0}
    assert _names(_STATE) == {"m", "back", "out"}


def test_arguments_stay_on_the_device_where_nothing_is_left_on_the_host() -> None:
    assert _names(_STATE.replace("pinned_host", "device")) == set()


def test_an_argument_that_is_also_read_here_stays() -> None:
    assert find_host_values(parse(_STATE.replace("add(there, x)", "add(m, there)"))).arguments == frozenset()


def test_rows_on_the_host_take_their_stack_along() -> None:
    assert _names(_STACKED) == {
        "kept", "grown", "out", "carried", "stack", "carried.1", "start", "loop", "rows", "last", "empty",
    }  # fmt: skip


def test_marks_are_read_again() -> None:
    module = parse(_STACKED)
    text = mark_host_values(module, find_host_values(module)).to_text()
    assert "f32[3,4]{1,0:S(5)} dynamic-update-slice" in text
    assert "f32[1,4] add" in text
    again = parse(text)
    assert mark_host_values(again, find_host_values(again)) is again


def test_layouts_of_the_entry_are_read() -> None:
    host, here = "f32[8,4]{1,0:S(5)}", "f32[8,4]{1,0}"
    layout = f"entry_computation_layout={{({host}, {here})->({here}, {host})}}"
    text = _STATE.replace("HloModule step,", f"HloModule step, {layout},")
    assert read_boundary(parse(text)) == ({0}, {1})
    placed = place_results(parse(text))
    assert find_host_values(placed).results == {0, 1}
    assert place_results(parse(_STATE)).to_text() == parse(_STATE).to_text()


def test_aliases_do_not_go_between_memories() -> None:
    text = _STATE.replace("tuple(back, new)", "tuple(new, back)")
    module = parse(text)
    assert drop_torn_aliases(module, find_host_values(module)).aliases == ()
    kept = parse(_STATE)
    assert drop_torn_aliases(kept, find_host_values(kept)) is kept


def test_unknown_memories_are_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match="memory of the kind 'disk'"):
        find_host_values(parse(_STATE.replace("pinned_host", "disk")))
