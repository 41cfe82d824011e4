"""Sizes known only at run time are refused before anything is planned."""

from __future__ import annotations

import pytest

import shardwright as sw

TEXTS = {
    "set-dimension-size": """HloModule masked

ENTRY main {
  values = f32[8,4]{1,0} parameter(0)
  count = s32[] parameter(1)
  short = f32[<=8,4]{1,0} set-dimension-size(values, count), dimensions={0}
  zero = f32[] constant(0)
  ROOT total = f32[<=8,4]{1,0} add(short, short)
}
""",
    "dynamic-reshape": """HloModule reshaped

ENTRY main {
  values = f32[8]{0} parameter(0)
  count = s32[] parameter(1)
  ROOT short = f32[<=8]{0} dynamic-reshape(values, count)
}
""",
}


@pytest.mark.parametrize("opcode", TEXTS)
def test_a_size_known_at_run_time_is_refused(opcode: str) -> None:
    with pytest.raises(sw.UnsupportedProgramError, match="known only at run time") as caught:
        sw.plan(TEXTS[opcode], 4, cache=False)
    assert opcode in caught.value.message
    assert caught.value.where.startswith("line ")
    assert "fixed size" in caught.value.remedy
