"""The order of XLA:TPU's kernels, on programs small enough to say by hand."""

from __future__ import annotations

from shardwright.cost import hardware_profile
from shardwright.cost.peak.fusion import fuse
from shardwright.cost.peak.schedule import schedule
from tests.cost.one_device import program_of

SUM = """
sum {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}
"""

BACKWARD = f"""HloModule backward
{SUM}
ENTRY main {{
  x = f32[512,64]{{1,0}} parameter(0)
  w = f32[64,64]{{1,0}} parameter(1)
  dy = f32[512,64]{{1,0}} dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  MOVED
  dx = f32[512,64]{{1,0}} dot(moved, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  second = f32[512,64]{{1,0}} SECOND(dx)
  dz = f32[512,64]{{1,0}} dot(second, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  third = f32[512,64]{{1,0}} SECOND(dz)
  last = f32[64,64]{{1,0}} dot(third, x), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  dw = f32[64,64]{{1,0}} dot(moved, x), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  ROOT out = (f32[64,64]{{1,0}}, f32[64,64]{{1,0}}) tuple(dw, last)
}}
"""


def order(text: str) -> list[str]:
    """Names of the products and collectives in the order they run."""
    program = program_of(text, "tpu-v5e")
    kernels = fuse(program, hardware_profile("tpu-v5e").compiler)
    ran = [node for (node,) in schedule(program, kernels, "least-memory")]
    assert sorted(ran) == [node for node, kept in enumerate(kernels.is_stored) if kept]
    place = {node: i for i, node in enumerate(ran)}
    assert all(place[source] < place[node] for node in ran for source in kernels.reads[node])
    wanted = ("dot", "all-to-all", "sort")
    return [program.instructions[node].name for node in ran if program.opcodes[node] in wanted]


def test_a_weights_gradient_runs_as_soon_as_it_frees_what_it_is_made_of() -> None:
    text = BACKWARD.replace("MOVED", "moved = f32[512,64]{1,0} sine(dy)").replace("SECOND", "sine")
    assert order(text) == ["dy", "dw", "dx", "dz", "last"]


def test_it_waits_for_two_collectives_that_run_beside_it() -> None:
    def sent(source: str) -> str:
        return f"f32[512,64]{{1,0}} all-to-all({source}), dimensions={{0}}"

    text = BACKWARD.replace("MOVED", f"moved = {sent('dy')}").replace("f32[512,64]{1,0} SECOND(dx)", sent("dx"))
    assert order(text.replace("f32[512,64]{1,0} SECOND(dz)", sent("dz"))) == [
        "dy", "moved", "dx", "second", "dz", "third", "dw", "last",
    ]  # fmt: skip


COPIES = """HloModule copies

less {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT lt = pred[] compare(l, r), direction=LT
}

ENTRY main {
  x = f32[256,256]{1,0} parameter(0)
  a = f32[64,64]{1,0} parameter(1)
  b = f32[64,64]{1,0} parameter(2)
  wide = f32[256,256]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  wider = f32[256,256]{1,0} dot(wide, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  few = f32[64,64]{1,0} slice(wider), slice={[0:64], [0:64]}
  first = f32[64,64]{1,0} sort(a), dimensions={0}, to_apply=less
  second = f32[64,64]{1,0} sort(b), dimensions={0}, to_apply=less
  one = f32[64,64]{1,0} dot(few, first), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  two = f32[64,64]{1,0} dot(one, second), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = f32[64,64]{1,0} dot(two, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_an_order_that_makes_values_where_they_are_read_is_taken_where_it_needs_less() -> None:
    """The list schedule would sort first, since that stores less than a product does."""
    assert order(COPIES) == ["wide", "wider", "first", "one", "second", "two", "out"]
