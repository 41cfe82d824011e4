"""What is stored, compiler by compiler, and the order it runs in; on programs small enough to say by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwright.cost import hardware_profile
from shardwright.cost.peak.bf16_propagation import round_for_products
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.fusion import Kernels, fuse
from shardwright.cost.peak.gather_layouts import GATHERED, find_gather_layouts
from shardwright.cost.peak.memory import temporaries_bytes
from shardwright.cost.peak.schedule import ScheduleStep, schedule
from shardwright.hlo import parse
from shardwright.plans.shardings import Mesh
from tests.cost.one_device import program_of

LAYERS = """HloModule layers, entry_computation_layout={(f32[64,64]{1,0}, f32[64]{0})->f32[64,64]{1,0}}

sum {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}

ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  b = f32[64]{0} parameter(1)
  zero = f32[] constant(0)
  first = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  wide = f32[64,64]{1,0} broadcast(b), dimensions={1}
  biased = f32[64,64]{1,0} add(first, wide)
  active = f32[64,64]{1,0} tanh(biased)
  second = f32[64,64]{1,0} dot(active, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  third = f32[64,64]{1,0} dot(active, second), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  square = f32[64,64]{1,0} multiply(third, third)
  total = f32[64]{0} reduce(square, zero), dimensions={0}, to_apply=sum
  spread = f32[64,64]{1,0} broadcast(total), dimensions={1}
  ROOT out = f32[64,64]{1,0} subtract(biased, spread)
}
"""


def fused(profile: str, size: int = 32) -> tuple[DeviceProgram, Kernels]:
    program = program_of(LAYERS.replace("64", str(size)), profile)
    return program, fuse(program, hardware_profile(profile).compiler)


@pytest.mark.parametrize(
    ("profile", "size", "kernels"),
    [
        # tanh is computed once for its two products; the sum is repeated by tanh and at the end.
        ("cpu", 32, {"first", "active", "second", "third", "total", "out"}),
        # From a size on it is one kernel of a library, around the reduction.
        ("cpu", 64, {"out"}),
        # Each product computes the tanh again; the last one is part of the reduction of its square.
        ("tpu-v5e", 64, {"first", "second", "total", "out"}),
    ],
)
def test_what_is_stored(profile: str, size: int, kernels: set[str]) -> None:
    program, result = fused(profile, size)
    stored = {program.instructions[i].name for i, kept in enumerate(result.is_stored) if kept and not result.is_view[i]}
    assert stored - {"x", "b", "zero"} == kernels


def test_breadth_first_runs_what_is_ready_before_what_becomes_so() -> None:
    program, result = fused("cpu")
    order = [program.instructions[node].name for (node,) in schedule(program, result, "breadth-first")]
    assert [name for name in order if name not in {"x", "b", "zero"}] == [
        "first", "active", "second", "third", "total", "out",
    ]  # fmt: skip
    assert order[:2] == ["x", "b"]


VIEWED = """HloModule viewed, entry_computation_layout={(f32[8,8]{1,0})->(f32[8,8]{1,0}, f32[4,4]{1,0})}

ENTRY main {
  x = f32[8,8]{1,0} parameter(0)
  made = f32[8,8]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  viewed = f32[4,16]{1,0} reshape(made)
  kernel = f32[8,8]{1,0} dot(made, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  last = f32[4,4]{1,0} dot(viewed, viewed), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT out = (f32[8,8]{1,0}, f32[4,4]{1,0}) tuple(kernel, last)
}
"""


def test_views_run_after_the_kernels_that_read_the_same() -> None:
    program = program_of(VIEWED)
    kernels = fuse(program, hardware_profile("cpu").compiler)
    order = [program.instructions[node].name for (node,) in schedule(program, kernels, "breadth-first")]
    assert order == ["x", "made", "kernel", "viewed", "last", "out"]


#: Of what `made` is read by, `late` comes first in the text, and `wide` on the way from the root.
RACE = """HloModule race

ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  y = f32[64,4096]{1,0} parameter(1)
  made = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  late = f32[64,64]{1,0} dot(made, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  wide = f32[64,4096]{1,0} dot(made, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  first = f32[64,64]{1,0} dot(wide, y), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  wider = f32[64,4096]{1,0} dot(late, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  second = f32[64,64]{1,0} dot(wider, y), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(first, second)
}
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("breadth-first", ["made", "wide", "late", "first", "wider", "second"]),
        ("breadth-first, as written", ["made", "late", "wide", "wider", "first", "second"]),
    ],
)
def test_readers_run_as_they_are_visited_or_as_they_are_written(name: str, expected: list[str]) -> None:
    program = program_of(RACE)
    kernels = fuse(program, hardware_profile("cpu").compiler)
    order = [ran for (ran,) in name_steps(program, schedule(program, kernels, name))]
    assert [each for each in order if each not in {"x", "y", "out"}] == expected


def test_of_the_orders_that_are_possible_the_one_counts_that_takes_most() -> None:
    cpu = hardware_profile("cpu")
    written = replace(cpu, compiler=replace(cpu.compiler, schedule="breadth-first, as written"))
    main, alone = parse(RACE).entry, Mesh.of({"x": 1})
    (most,), (as_written,) = (temporaries_bytes([main], [], alone, profile) for profile in (cpu, written))
    assert most == as_written > 2 * 64 * 4096 * 4
    turned_round = parse(RACE.replace("tuple(first, second)", "tuple(second, first)")).entry
    assert temporaries_bytes([turned_round], [], alone, cpu) == (most,)


def name_steps(program: DeviceProgram, steps: Sequence[ScheduleStep]) -> list[list[str]]:
    """The names of the instructions of each step."""
    return [[program.instructions[node].name for node in step] for step in steps]


def test_nodes_that_run_together_wait_for_the_last() -> None:
    text = """HloModule pair
ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  early = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  first = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  late = f32[64,64]{1,0} dot(first, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(early, late)
}
"""
    program = program_of(text)
    kernels = fuse(program, hardware_profile("cpu").compiler)
    names = {instruction.name: node for node, instruction in enumerate(program.instructions)}
    pair = (names["early"], names["late"])
    assert name_steps(program, schedule(program, kernels, "breadth-first")) == [
        ["x"], ["early"], ["first"], ["late"], ["out"],
    ]  # fmt: skip
    together = schedule(program, kernels, "breadth-first", [pair])
    assert name_steps(program, together) == [["x"], ["first"], ["early", "late"], ["out"]]


def test_in_the_order_of_the_text_what_runs_together_waits_as_well() -> None:
    """What reads one of them runs behind both; the rest keeps its order."""
    text = """HloModule pair
ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  early = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  reader = f32[64,64]{1,0} dot(early, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  first = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  late = f32[64,64]{1,0} dot(first, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(reader, late)
}
"""
    program = program_of(text)
    kernels = fuse(program, hardware_profile("a100").compiler)
    names = {instruction.name: node for node, instruction in enumerate(program.instructions)}
    steps = schedule(program, kernels, "program", [(names["early"], names["late"])])
    assert name_steps(program, steps) == [["x"], ["first"], ["early", "late"], ["reader"], ["out"]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("program", ["made", "next", "last", "sums"]),
        ("post-order, reductions early", ["made", "sums", "next", "last"]),
    ],
)
def test_reductions_run_with_the_first_that_reads_the_same(name: str, expected: list[str]) -> None:
    text = """HloModule sums
add {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}
ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  zero = f32[] constant(0)
  made = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  next = f32[64,64]{1,0} dot(made, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  last = f32[64,64]{1,0} dot(next, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  sums = f32[64]{0} reduce(made, zero), dimensions={0}, to_apply=add
  ROOT out = (f32[64,64]{1,0}, f32[64]{0}) tuple(last, sums)
}
"""
    program = program_of(text)
    kernels = fuse(program, hardware_profile("a100").compiler)
    order = [ran for (ran,) in name_steps(program, schedule(program, kernels, name))]
    assert [each for each in order if each not in {"x", "zero", "out"}] == expected


@pytest.mark.parametrize(("opcode", "is_stored"), [("logistic", False), ("exponential", False), ("tanh", True)])
def test_gpus_compute_a_quotient_again_and_store_a_tanh(opcode: str, is_stored: bool) -> None:
    text = f"""HloModule gated
ENTRY main {{
  x = f32[64,64]{{1,0}} parameter(0)
  made = f32[64,64]{{1,0}} dot(x, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  gate = f32[64,64]{{1,0}} {opcode}(made)
  out = f32[64,64]{{1,0}} multiply(made, gate)
  back = f32[64,64]{{1,0}} dot(out, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  slope = f32[64,64]{{1,0}} multiply(back, gate)
  ROOT last = f32[64,64]{{1,0}} dot(slope, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
    program = program_of(text, "a100")
    kernels = fuse(program, hardware_profile("a100").compiler)
    (gate,) = (node for node, each in enumerate(program.instructions) if each.name == "gate")
    assert kernels.is_stored[gate] == is_stored


CENTRED = """HloModule centred, entry_computation_layout={(f32[64,64]{1,0}, f32[64,64]{1,0})->f32[64,64]{1,0}}

sum {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}

ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  y = f32[64,64]{1,0} parameter(1)
  zero = f32[] constant(0)
  both = f32[64,64]{1,0} add(x, y)
  total = f32[64]{0} reduce(both, zero), dimensions={1}, to_apply=sum
  spread = f32[64,64]{1,0} broadcast(total), dimensions={0}
  centred = f32[64,64]{1,0} subtract(both, spread)
  sent = f32[64,64]{1,0} reverse(centred), dimensions={0}
  ROOT out = f32[64,64]{1,0} transpose(sent), dimensions={1,0}
}
"""


SENT = """HloModule sent
ENTRY main {{
  x = f32[64,64]{{1,0}} parameter(0)
  b = f32[64]{{0}} parameter(1)
  made = f32[64,64]{{1,0}} dot(x, x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  wide = f32[64,64]{{1,0}} broadcast(b), dimensions={{0}}
  shifted = f32[64,64]{{1,0}} subtract(made, wide)
  gathered = f32[64,128]{{1,0}} all-gather(shifted), replica_groups={{{{0,1}}}}, dimensions={{1}}
  sent = f32[64,128]{{1,0}} copy(gathered)
  product = f32[64,64]{{1,0}} multiply(shifted, x)
  spread = f32[64,64]{{1,0}} multiply(wide, x)
  ROOT out = ({types}) tuple({root})
}}
"""


def test_what_a_library_takes_in_is_not_stored_for_being_gathered() -> None:
    """It is one kernel, in whichever order the all-gather that sends its value on wants that."""
    profile = hardware_profile("cpu")
    program = program_of(CENTRED, "cpu")
    number = {instruction.name: node for node, instruction in enumerate(program.instructions)}
    program.marks[number["out"]] = GATHERED
    assert {number["both"], number["centred"]} <= find_gather_layouts(program)
    kernels = fuse(program, profile.compiler)
    assert not kernels.is_stored[number["both"]]
    assert set(kernels.reads[number["centred"]]) == {number["x"], number["y"], number["zero"]}


@pytest.mark.parametrize(
    ("root", "in_column_order"),
    [
        ("product, spread, sent", {"shifted", "wide"}),
        ("product, sent, spread", {"shifted"}),
        ("sent, product, spread", set[str]()),
    ],
)
def test_what_is_sent_lies_as_its_last_readers_in_post_order_have_it(root: str, in_column_order: set[str]) -> None:
    """As XLA:CPU's HLO after layout assignment shows it (jaxlib 0.10.2, `--xla_dump_hlo_pass_re=layout-assignment`)."""
    program, _ = sent(root)
    names = {program.instructions[node].name for node in find_gather_layouts(program)}
    assert names == in_column_order


def test_what_is_sent_in_another_order_is_computed_again_by_those_who_read_it_as_it_is() -> None:
    program, number = sent("product, spread, sent")
    kernels = fuse(program, hardware_profile("cpu").compiler)
    assert kernels.is_stored[number["shifted"]]
    assert set(kernels.reads[number["product"]]) == {number["made"], number["b"], number["x"]}


@pytest.mark.parametrize(("root", "is_twice"), [("product, spread, sent", True), ("product, sent, spread", False)])
def test_what_adds_a_copied_spread_number_reads_two_arrays(root: str, is_twice: bool) -> None:
    """Spread for readers behind the all-gather, too, it is copied for what is sent."""
    program, number = sent(root)
    kernels = fuse(program, hardware_profile("cpu").compiler)
    assert (number["made"] in kernels.reads[number["product"]]) == is_twice


def sent(root: str) -> tuple[DeviceProgram, dict[str, int]]:
    """A program that gathers columns, by the order in which its root reads what else it makes, and its nodes."""
    types = ", ".join(f"f32[64,{128 if name == 'sent' else 64}]{{1,0}}" for name in root.split(", "))
    program = program_of(SENT.format(types=types, root=root), "cpu")
    number = {instruction.name: node for node, instruction in enumerate(program.instructions)}
    program.marks[number["sent"]] = GATHERED
    return program, number


def stored(text: str, profile: str) -> set[str]:
    """Names of what is stored, beside arguments and constants."""
    program = program_of(text, profile)
    compiler = hardware_profile(profile).compiler
    if compiler.runs("products_read_bf16"):
        round_for_products(program)
    result = fuse(program, compiler)
    return {
        program.instructions[node].name
        for node, is_kept in enumerate(result.is_stored)
        if is_kept and not result.is_view[node] and program.opcodes[node] not in ("parameter", "constant")
    }


GROUPED = """HloModule grouped

ENTRY main {
  x = f32[8,64]{1,0} parameter(0)
  made = f32[8,64]{1,0} sine(x)
  groups = f32[8,4,16]{2,1,0} reshape(made)
  both = f32[8,4,16]{2,1,0} add(groups, groups)
  ROOT rows = f32[2,4,4,16]{3,2,1,0} reshape(both)
}
"""


@pytest.mark.parametrize(("profile", "kernels"), [("tpu-v5e", {"made", "groups", "rows"}), ("cpu", {"rows"})])
def test_a_reshape_of_the_innermost_dimension_copies_in_tiled_memory(profile: str, kernels: set[str]) -> None:
    assert stored(GROUPED, profile) == kernels


UPDATE = """HloModule update

ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  w = f32[64,64]{1,0} parameter(1)
  m = f32[64,64]{1,0} parameter(2)
  v = f32[64,64]{1,0} parameter(3)
  made = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  first = f32[64,64]{1,0} add(m, made)
  square = f32[64,64]{1,0} multiply(made, made)
  second = f32[64,64]{1,0} add(v, square)
  moved = f32[64,64]{1,0} subtract(w, first)
  LAST
}
"""
RESULTS = "ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(moved, first, second)"
READ_AGAIN = """more = f32[64,64]{1,0} dot(second, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(moved, first, more)"""


@pytest.mark.parametrize(("last", "is_stored"), [(RESULTS, False), (READ_AGAIN, True)])
def test_a_gradient_is_computed_by_the_one_kernel_that_updates_its_variable(last: str, is_stored: bool) -> None:
    assert ("made" in stored(UPDATE.replace("LAST", last), "tpu-v5e")) == is_stored


def test_what_products_read_of_a_product_is_stored_by_that_ones_kernel() -> None:
    text = """HloModule gate
ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  y = f32[64,64]{1,0} parameter(1)
  made = f32[64,64]{1,0} dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  square = f32[64,64]{1,0} multiply(made, made)
  gate = f32[64,64]{1,0} add(square, made)
  one = f32[64,64]{1,0} dot(gate, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  two = f32[64,64]{1,0} dot(gate, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(one, two)
}
"""
    assert stored(text, "tpu-v5e") == {"gate", "one", "two"}


def test_what_ends_a_products_kernel_is_what_others_read() -> None:
    """A barrier has to find the sum stored: the product is not stored beside it."""
    text = """HloModule held
ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  b = f32[64]{0} parameter(1)
  made = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  wide = f32[64,64]{1,0} broadcast(b), dimensions={1}
  biased = f32[64,64]{1,0} add(made, wide)
  held = (f32[64,64]{1,0}) tuple(biased)
  barrier = (f32[64,64]{1,0}) opt-barrier(held)
  again = f32[64,64]{1,0} get-tuple-element(barrier), index=0
  active = f32[64,64]{1,0} tanh(biased)
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(active, again)
}
"""
    assert stored(text, "tpu-v5e") == {"biased", "active"}


CONVOLVED = """HloModule convolved

ENTRY main {
  x = f32[2,8,8,16]{3,2,1,0} parameter(0)
  y = f32[2,8,8,16]{3,2,1,0} parameter(1)
  k = f32[3,3,16,16]{3,2,1,0} parameter(2)
  l = f32[3,3,16,16]{3,2,1,0} parameter(3)
  total = f32[2,8,8,16]{3,2,1,0} TOTAL
  one = f32[2,8,8,16]{3,2,1,0} convolution(total, k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
  two = f32[2,8,8,16]{3,2,1,0} convolution(total, l), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
  ROOT out = (f32[2,8,8,16]{3,2,1,0}, f32[2,8,8,16]{3,2,1,0}) tuple(one, two)
}
"""


@pytest.mark.parametrize(("total", "is_stored"), [("add(x, y)", True), ("negate(x)", False)])
def test_what_several_convolutions_read_is_computed_once_unless_it_costs_little(total: str, is_stored: bool) -> None:
    assert ("total" in stored(CONVOLVED.replace("TOTAL", total), "tpu-v5e")) == is_stored


MIXTURE = """HloModule mixture

ENTRY main {
  x = f32[4,2,8,16]{3,2,1,0} parameter(0)
  up = f32[4,16,32]{2,1,0} parameter(1)
  down = f32[4,32,16]{2,1,0} parameter(2)
  made = f32[4,2,8,32]{3,2,1,0} dot(x, up), lhs_batch_dims={0}, lhs_contracting_dims={3}, rhs_batch_dims={0}, rhs_contracting_dims={1}
  active = f32[4,2,8,32]{3,2,1,0} multiply(made, made)
  back = f32[4,2,8,16]{3,2,1,0} dot(active, down), lhs_batch_dims={0}, lhs_contracting_dims={3}, rhs_batch_dims={0}, rhs_contracting_dims={1}
  ROOT out = (f32[4,2,8,16]{3,2,1,0}, f32[4,2,8,32]{3,2,1,0}) tuple(back, made)
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("experts", "rows", "is_stored"),
    [
        (4, 2, True),  # a copy that lies otherwise computes nothing
        (1, 2, False),  # one product
        (4, 1, False),  # nothing lies between batch and rows
    ],
)
def test_what_is_read_in_another_order_is_stored_in_two_precisions(experts: int, rows: int, is_stored: bool) -> None:
    text = MIXTURE.replace("[4,2,", f"[{experts},{rows},").replace("[4,", f"[{experts},")
    result = stored(text, "tpu-v5e")
    assert "made" in result
    assert ("active" in result) == is_stored


CUT = """HloModule cut

ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  y = f32[64,64]{1,0} parameter(1)
  at = s32[] parameter(2)
  zero = s32[] constant(0)
  mask = f32[64,64]{1,0} multiply(x, y)
  part = f32[64,16]{1,0} dynamic-slice(mask, zero, at), dynamic_slice_sizes={64,16}
  READ
  ROOT out = (f32[64,16]{1,0}) tuple(read)
}
"""


@pytest.mark.parametrize(
    ("operation", "is_stored"),
    [
        ("dot(y, part), lhs_contracting_dims={1}, rhs_contracting_dims={0}", True),
        ("negate(part)", False),
    ],
)
def test_what_a_product_reads_a_part_of_is_stored(operation: str, is_stored: bool) -> None:
    text = CUT.replace("READ", f"read = f32[64,16]{{1,0}} {operation}")
    assert ("mask" in stored(text, "tpu-v5e")) == is_stored


@pytest.mark.parametrize(("operand", "is_stored"), [("padded", True), ("two", False)])
def test_padding_is_not_computed_by_two_kernels(operand: str, is_stored: bool) -> None:
    text = f"""HloModule padded
ENTRY main {{
  x = f32[64,61]{{1,0}} parameter(0)
  zero = f32[] constant(0)
  padded = f32[64,64]{{1,0}} pad(x, zero), padding=0_0x0_3
  two = f32[64,64]{{1,0}} sine(padded)
  one = f32[64,64]{{1,0}} negate({operand})
  ROOT out = (f32[64,64]{{1,0}}, f32[64,64]{{1,0}}) tuple(one, two)
}}
"""
    assert ("padded" in stored(text, "cpu")) == is_stored
