"""`%tuple#1`: how the XLA of jax 0.11 and later names an element of a tuple among operands."""

from __future__ import annotations

import pytest

from shardwright.errors import HloSyntaxError
from shardwright.hlo import parse
from shardwright.xla import canonical_hlo

SHORT = """HloModule m

ENTRY %e (p: (f32[2], (f32[3], s32[]))) -> f32[2] {
  %p = (f32[2]{0}, (f32[3]{0}, s32[])) parameter(0)
  %q = f32[3]{0} negate(%p#1#0)
  %r = (f32[2]{0}, f32[2]{0}) tuple(%p#0, f32[2]{0} %p#0)
  %s = f32[3]{0} add(%q, %p#1#0)
  ROOT %n = f32[2]{0} negate(%r#1)
}
"""

#: What XLA (jax 0.12) prints after reading SHORT.
LONG = """HloModule m

ENTRY %e (p: (f32[2], (f32[3], s32[]))) -> f32[2] {
  %p = (f32[2]{0}, (f32[3]{0}, s32[])) parameter(0)
  %p_1 = (f32[3]{0}, s32[]) get-tuple-element(%p), index=1
  %p_1_0 = f32[3]{0} get-tuple-element(%p_1), index=0
  %q = f32[3]{0} negate(%p_1_0)
  %p_0 = f32[2]{0} get-tuple-element(%p), index=0
  %r = (f32[2]{0}, f32[2]{0}) tuple(%p_0, %p_0)
  %s = f32[3]{0} add(%q, %p_1_0)
  %r_1 = f32[2]{0} get-tuple-element(%r), index=1
  ROOT %n = f32[2]{0} negate(%r_1)
}
"""


def test_elements_become_instructions_as_in_xla() -> None:
    assert parse(SHORT).to_text() == parse(LONG).to_text()
    assert canonical_hlo(parse(SHORT).to_text()) == canonical_hlo(LONG)


@pytest.mark.parametrize("operand", ["%p#2", "%p#0#0", "%p#", "%p#-1", "%p#x", "%q#0"])
def test_elements_that_are_not_there(operand: str) -> None:
    with pytest.raises(HloSyntaxError):
        parse(SHORT.replace("negate(%p#1#0)", f"negate({operand})"))
