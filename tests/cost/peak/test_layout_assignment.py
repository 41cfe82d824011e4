"""Arguments that XLA:TPU copies into the layout of a weight's gradient, and the memory of arguments between uses."""

from __future__ import annotations

import pytest

from shardwright.cost import hardware_profile
from shardwright.cost.peak.buffer_assignment import assign_buffers
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.layout_assignment import TRANSPOSED
from tests.cost.one_device import program_of

STEP = """HloModule step

ENTRY main {
  x = f32[512,64]{1,0} parameter(0)
  w = f32[64,64]{1,0} parameter(1)
  m = f32[64,64]{1,0} parameter(2)
  y = f32[512,64]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  dw = f32[64,64]{1,0} dot(y, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  turned = f32[64,64]{1,0} TURNED(dw)
  momentum = f32[64,64]{1,0} add(m, turned)
  moved = f32[64,64]{1,0} subtract(w, momentum)
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(moved, momentum)
}
"""


def step(turned: str, profile: str = "tpu-v5e") -> DeviceProgram:
    ending = ", dimensions={1,0}" if turned == "transpose" else ""
    text = STEP.replace("TURNED(dw)", f"{turned}(dw){ending}")
    return program_of(text, profile)


@pytest.mark.parametrize(
    ("turned", "profile", "copied"),
    [("transpose", "tpu-v5e", {"w", "m"}), ("negate", "tpu-v5e", set()), ("transpose", "cpu", set())],
)
def test_weights_and_moments_are_copied(turned: str, profile: str, copied: set[str]) -> None:
    program = step(turned, profile)
    copies = [node for node, mark in program.marks.items() if mark == TRANSPOSED]
    assert {program.instructions[node].name for node in copies} == copied
    (product,) = (node for node, each in enumerate(program.instructions) if each.name == "y")
    assert not set(copies) & set(program.operands[product])  # products read either layout


def test_copies_are_stored() -> None:
    program = step("transpose")
    buffers = assign_buffers(program, hardware_profile("tpu-v5e"))
    stored = {node: size for (node, _), size in zip(buffers.owners, buffers.size_bytes, strict=True) if size}
    assert [stored.get(node) for node, mark in program.marks.items() if mark == TRANSPOSED] == [4 * 64 * 64] * 2


@pytest.mark.parametrize(("profile", "is_free"), [("tpu-v5e", True), ("cpu", False)])
def test_an_argument_is_free_between_its_last_reader_and_what_is_written_over_it(profile: str, is_free: bool) -> None:
    text = """HloModule late
ENTRY main {
  w = f32[64,64]{1,0} parameter(0)
  x = f32[64,64]{1,0} parameter(1)
  y = f32[64,64]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  z = f32[64,64]{1,0} dot(y, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  last = f32[64,64]{1,0} dot(z, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = (f32[64,64]{1,0}) tuple(last)
}
"""
    program = program_of(text, profile)
    node = {instruction.name: i for i, instruction in enumerate(program.instructions)}
    buffers = assign_buffers(program, hardware_profile(profile), donated={node["w"]: node["last"]})
    order = [node for (node,) in buffers.order]
    expected = [(4 * 64 * 64, order.index(node["y"]) + 1, order.index(node["last"]) - 1)]
    assert buffers.free == (expected if is_free else [])
