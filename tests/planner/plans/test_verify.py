"""The plan checker: good plans pass, and a plan broken in any one way does not.

The good plans come from the planner and, for control flow and partial sums, from hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import PlanCheckError
from shardwright.hlo import Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan as make_plan
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.rules import linear
from shardwright.plans.plan import CostSummary, InstructionPlan, MemorySummary, Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding


def train_step(parameters: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(parameters: Any) -> jax.Array:
        hidden = jax.nn.relu(x @ parameters[0] + parameters[1])
        return jnp.mean((hidden @ parameters[2] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value


def lower_to_text() -> str:
    shapes = [[(32, 64), (64,), (64, 16)], (16, 32), (16, 16)]
    arguments = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "f4"), shapes, is_leaf=lambda leaf: isinstance(leaf, tuple)
    )
    return jax.jit(train_step, donate_argnums=0, keep_unused=True).lower(*arguments).as_text("hlo")


@pytest.fixture(scope="module")
def good() -> tuple[Module, Plan]:
    text = lower_to_text()
    plan = make_plan(text, Cluster.local(8), PlanOptions(mesh={"data": 2, "model": 4}, force="mixed"))
    return parse(plan.require_hlo()), plan  # calls are written out


def refusal_of(module: Module, plan: Plan, *words: str) -> None:
    with pytest.raises(PlanCheckError) as caught:
        check_plan(module, plan)
    for word in words:
        assert word in str(caught.value)


def find(plan: Plan, test: Callable[[InstructionPlan], bool]) -> InstructionPlan:
    return next(entry for entry in plan.instructions if test(entry))


def swap(plan: Plan, old: InstructionPlan, **changes: Any) -> Plan:
    """The plan with one entry changed."""
    instructions = tuple(replace(each, **changes) if each is old else each for each in plan.instructions)
    return replace(plan, instructions=instructions)


def sharding(*dims: str, unreduced: str = "") -> TensorSharding:
    return TensorSharding(tuple(tuple(dim) for dim in dims), tuple(unreduced))


def test_good_plans_pass(good: tuple[Module, Plan]) -> None:
    check_plan(*good)
    assert any(entry.partial for entry in good[1].instructions)
    assert any(not each.is_replicated for entry in good[1].instructions for each in entry.result)


# ---- a planned training step, broken ------------------------------------------


def test_missing_extra_and_double_entries(good: tuple[Module, Plan]) -> None:
    module, plan = good
    first = plan.instructions[0]
    refusal_of(module, replace(plan, instructions=plan.instructions[1:]), first.name, "has no entry")
    refusal_of(module, replace(plan, instructions=(*plan.instructions, first)), first.name, "two entries")
    stranger = replace(first, name="stranger")
    refusal_of(module, replace(plan, instructions=(*plan.instructions, stranger)), "stranger", "no such instruction")
    moved = swap(plan, first, computation="elsewhere")
    refusal_of(module, moved, "elsewhere", "no such instruction")


def test_another_program(good: tuple[Module, Plan]) -> None:
    module, plan = good
    refusal_of(module, replace(plan, module_name="other"), "other")
    refusal_of(module, replace(plan, hlo_text="HloModule other"), "hlo_sha256")


def test_wrong_form(good: tuple[Module, Plan]) -> None:
    module, plan = good
    dot = find(plan, lambda entry: entry.opcode == "dot")
    refusal_of(module, swap(plan, dot, opcode="add"), dot.name, "planned as add")
    refusal_of(module, swap(plan, dot, operands=dot.operands[:1]), dot.name, "1 operands")
    refusal_of(module, swap(plan, dot, result=(TensorSharding.replicated(3),)), dot.name, "rank 2")
    refusal_of(module, swap(plan, dot, result=()), dot.name, "0 shardings")
    ghost = TensorSharding((("ghost",), ()))
    refusal_of(module, swap(plan, dot, result=(ghost,)), dot.name, "ghost")
    refusal_of(module, swap(plan, dot, partial=("ghost",)), dot.name, "ghost")
    refusal_of(module, swap(plan, dot, result=(TensorSharding((("model", "data"), ())),)), "out of mesh order")


def test_every_sharding_counts(good: tuple[Module, Plan]) -> None:
    """Changing any one result or operand sharding of any instruction is noticed."""
    module, plan = good
    broken = [(entry, changed) for entry in plan.instructions for changed in corrupt(entry)]
    assert len(broken) > 100
    unnoticed = [pair for pair in broken if passes(module, swap(plan, pair[0], **pair[1]))]
    assert unnoticed == []


def passes(module: Module, plan: Plan) -> bool:
    try:
        check_plan(module, plan)
    except PlanCheckError:
        return False
    return True


def corrupt(entry: InstructionPlan) -> list[dict[str, Any]]:
    """Ways to break one entry: a split more or less in one operand or the result, a reduction more or less.

    Left out is what may be legal: an instruction that takes nothing (a constant) may be split at will,
    and partial sums may be scattered or not.
    """
    results: list[dict[str, Any]] = []
    if entry.partial:
        results.append({"partial": entry.partial[1:]})
    elif entry.opcode != "parameter":
        results.append({"partial": ("data",)})
    if entry.opcode in ("constant", "iota", "broadcast"):
        return results
    for leaf, changed in enumerate(_change(entry.result)):
        if changed is None or (entry.partial and set(changed.axes) ^ set(entry.result[leaf].axes) <= {*entry.partial}):
            continue
        if not (entry.partial and len(changed.axes) > len(entry.result[leaf].axes)):
            results.append({"result": (*entry.result[:leaf], changed, *entry.result[leaf + 1 :])})
    for i, operand in enumerate(entry.operands):
        for leaf, changed in enumerate(_change(operand)):
            if changed is not None and entry.opcode != "dot":
                value = (*operand[:leaf], changed, *operand[leaf + 1 :])
                results.append({"operands": (*entry.operands[:i], value, *entry.operands[i + 1 :])})
    return results


def _change(value: tuple[TensorSharding, ...]) -> list[TensorSharding | None]:
    """Each leaf with its first split taken away, or, if it has none, its first dimension split over data."""
    changed: list[TensorSharding | None] = []
    for each in value:
        split = next((dim for dim, axes in enumerate(each.dims) if axes), None)
        if split is not None:
            changed.append(TensorSharding((*each.dims[:split], (), *each.dims[split + 1 :])))
        elif each.dims:
            changed.append(TensorSharding((("data",), *each.dims[1:])))
        else:
            changed.append(None)
    return changed


def test_boundary_and_aliases(good: tuple[Module, Plan]) -> None:
    module, plan = good
    first, *others = plan.parameters
    refusal_of(module, replace(plan, parameters=tuple(others)), "parameters planned")

    def with_first(**changes: Any) -> Plan:
        return replace(plan, parameters=(replace(first, **changes), *others))

    refusal_of(module, with_first(number=3), "number 3")
    refusal_of(module, with_first(shape=(1, 2)), "[1, 2]")
    refusal_of(module, with_first(element_type="bf16"), "bf16")
    refusal_of(module, with_first(stored_shape=(40, 64)), "stored as")
    refusal_of(module, with_first(alias=None), "alias")
    refusal_of(module, with_first(alias=2), "alias")
    other = TensorSharding.replicated(2) if first.sharding.axes else TensorSharding((("data",), ()))
    refusal_of(module, with_first(sharding=other), "inside the program")
    outputs = tuple(replace(each, alias=None) for each in plan.outputs)
    refusal_of(module, replace(plan, outputs=outputs), "program says")
    loss = plan.outputs[-1]
    partial = replace(loss, sharding=TensorSharding((), ("data",)))
    refusal_of(module, replace(plan, outputs=(*plan.outputs[:-1], partial)), "partial")


def test_collectives_must_exist(good: tuple[Module, Plan]) -> None:
    module, plan = good
    first, *others = plan.collectives
    refusal_of(module, replace(plan, collectives=(replace(first, instruction="ghost"), *others)), "ghost")
    refusal_of(module, replace(plan, collectives=(replace(first, axes=("ghost",)), *others)), "ghost")
    refusal_of(module, replace(plan, collectives=(replace(first, count=0), *others)), "out of range")


# ---- plans by hand ------------------------------------------------------------


def by_hand(text: str, entries: dict[str, Any], **mesh: int) -> tuple[Module, Plan]:
    """A plan of `text`. entries: name → (operands, result, partial); those left out are replicated."""
    module = parse(text)
    sizes = mesh or {"x": 2, "y": 4}
    instructions = []
    for computation in module.computations:
        if computation.name.startswith("region"):
            continue
        for each in computation:
            operands, result, partial = entries.get(each.name, (None, None, ()))
            whole = [tuple(TensorSharding.replicated(leaf.rank) for leaf in o.shape.leaves) for o in each.operands]
            instructions.append(
                InstructionPlan(
                    computation=computation.name,
                    name=each.name,
                    opcode=each.opcode,
                    operands=tuple(whole) if operands is None else tuple(_value(o) for o in operands),
                    result=tuple(TensorSharding.replicated(leaf.rank) for leaf in each.shape.leaves)
                    if result is None
                    else _value(result),
                    partial=tuple(partial),
                )
            )
    of = {entry.name: entry for entry in instructions}
    parameters = [
        (leaf, of[each.name].result[i]) for each in module.entry.parameters for i, leaf in enumerate(each.shape.leaves)
    ]
    outputs = list(zip(module.entry.root.shape.leaves, of[module.entry.root.name].result, strict=True))
    shape = Mesh.of(sizes)
    plan = Plan(
        module_name=module.name,
        hlo_sha256=sha256(text.encode()).hexdigest(),
        mesh=shape,
        hardware="cpu",
        origin="hand",
        instructions=tuple(instructions),
        parameters=_variables(parameters, shape),
        outputs=_variables(outputs, shape),
        collectives=(),
        cost=CostSummary(compute_s=0.0, communication_s=0.0, lower_bound_s=0.0, bound_scope=""),
        memory=MemorySummary(arguments_bytes=0, outputs_bytes=0, temporaries_bytes=0),
        hlo_text=text,
    )
    return module, plan


def _value(value: Any) -> tuple[TensorSharding, ...]:
    return (value,) if isinstance(value, TensorSharding) else tuple(value)


def _variables(leaves: list[Any], mesh: Mesh) -> tuple[VariablePlan, ...]:
    return tuple(
        VariablePlan(
            number=i,
            name=f"v{i}",
            element_type=leaf.element_type,
            shape=leaf.dimensions,
            sharding=each,
            stored_shape=tuple(
                -(-n // mesh.size(axes)) * mesh.size(axes) for n, axes in zip(leaf.dimensions, each.dims, strict=True)
            ),
        )
        for i, (leaf, each) in enumerate(leaves)
    )


PRODUCTS = """HloModule products, entry_computation_layout={(f32[8,16]{1,0}, f32[16,4]{1,0})->f32[8,4]{1,0}}

ENTRY main {
  a = f32[8,16]{1,0} parameter(0)
  b = f32[16,4]{1,0} parameter(1)
  first = f32[8,4]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  second = f32[8,4]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  sum = f32[8,4]{1,0} add(first, second)
  ROOT out = f32[8,4]{1,0} exponential(sum)
}
"""

SPLIT = {"a": ([], sharding("", "x"), ()), "b": ([], sharding("x", ""), ())}
PARTIAL = sharding("", "", unreduced="x")
OPERANDS = [sharding("", "x"), sharding("x", "")]


def test_partial_sums_added_before_they_are_reduced() -> None:
    """Two partial products are added while partial, used reduced afterwards: one reduction."""
    entries = SPLIT | {
        "first": (OPERANDS, PARTIAL, ()),
        "second": (OPERANDS, PARTIAL, ()),
        "sum": ([PARTIAL, PARTIAL], PARTIAL, ()),
    }
    check_plan(*by_hand(PRODUCTS, entries))
    one_whole = entries | {
        "second": (OPERANDS, sharding("", ""), ("x",)),
        "sum": ([PARTIAL, sharding("", "")], PARTIAL, ()),
    }
    refusal_of(*by_hand(PRODUCTS, one_whole), "sum", "not linear")
    claimed = entries | {"second": (OPERANDS, sharding("", ""), ("x",))}
    check_plan(*by_hand(PRODUCTS, claimed))  # kept on one device
    split = entries | {"second": (OPERANDS, sharding("x", ""), ("x",))}
    refusal_of(*by_hand(PRODUCTS, split), "operand 1 is used as partial", "second is split")
    lost = entries | {"sum": ([PARTIAL, PARTIAL], sharding("", ""), ())}
    refusal_of(*by_hand(PRODUCTS, lost), "sum", "the result is not")
    bent = entries | {"out": ([PARTIAL], PARTIAL, ())}
    refusal_of(*by_hand(PRODUCTS, bent), "out", "not linear")


def test_a_sum_of_partial_sums_may_be_reduced_where_it_is_made() -> None:
    entries = SPLIT | {"first": (OPERANDS, PARTIAL, ()), "second": (OPERANDS, PARTIAL, ())}
    for result in (sharding("", ""), sharding("x", ""), sharding("", "x")):
        check_plan(*by_hand(PRODUCTS, entries | {"sum": ([PARTIAL, PARTIAL], result, ("x",))}))
    refusal_of(*by_hand(PRODUCTS, entries | {"sum": ([PARTIAL, PARTIAL], PARTIAL, ("x",))}), "sum", "not linear")
    refusal_of(*by_hand(PRODUCTS, entries | {"sum": ([PARTIAL, sharding("x", "")], sharding("x", ""), ())}), "sum")


LINEAR = """HloModule linear, entry_computation_layout={(f32[8,16]{1,0}, f32[16,4]{1,0}, s32[3]{0})->f32[3,4]{1,0}}

region_add {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}

ENTRY main {
  a = f32[8,16]{1,0} parameter(0)
  b = f32[16,4]{1,0} parameter(1)
  i = s32[3]{0} parameter(2)
  zero = f32[] constant(0)
  one = f32[] constant(1)
  zeros = f32[8,4]{1,0} broadcast(zero), dimensions={}
  ones = f32[8,4]{1,0} broadcast(one), dimensions={}
  p = f32[8,4]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  scaled = f32[8,4]{1,0} multiply(p, ones)
  square = f32[8,4]{1,0} multiply(p, p)
  inverse = f32[8,4]{1,0} divide(ones, p)
  shifted = f32[8,4]{1,0} add(p, ones)
  same = f32[8,4]{1,0} add(p, zeros)
  narrow = bf16[8,4]{1,0} convert(p)
  cleared = f32[9,4]{1,0} pad(p, zero), padding=0_1x0_0
  padded = f32[9,4]{1,0} pad(p, one), padding=0_1x0_0
  total = f32[8]{0} reduce(p, one), dimensions={1}, to_apply=region_add
  rows = f32[3,4]{1,0} gather(p, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,4}
  larger = f32[8,4]{1,0} maximum(p, zeros)
  ROOT out = f32[3,4]{1,0} negate(rows)
}
"""  # noqa: E501

SUMMED = SPLIT | {"p": (OPERANDS, PARTIAL, ())}
WHOLE, NUMBER, INDEX = sharding("", ""), TensorSharding(()), sharding("")


def test_partial_sums_go_where_the_instruction_is_linear() -> None:
    both, left, number = [PARTIAL, PARTIAL], [PARTIAL, WHOLE], [PARTIAL, NUMBER]
    for name, operands in {"scaled": left, "square": left, "same": both, "shifted": both, "cleared": number}.items():
        check_plan(*by_hand(LINEAR, SUMMED | {name: (operands, PARTIAL, ())}))
    gathered = SUMMED | {"rows": ([PARTIAL, INDEX], PARTIAL, ()), "out": ([PARTIAL], PARTIAL, ())}
    refusal_of(*by_hand(LINEAR, gathered), "output 0", "partial: nothing reduces it")
    check_plan(*by_hand(LINEAR, gathered | {"out": ([PARTIAL], WHOLE, ("x",))}))
    check_plan(*by_hand(LINEAR, gathered | {"out": ([sharding("y", "", unreduced="")], sharding("y", ""), ())}))


@pytest.mark.parametrize(
    ("name", "operands", "result"),
    [
        ("square", [PARTIAL, PARTIAL], PARTIAL),
        ("inverse", [WHOLE, PARTIAL], PARTIAL),
        ("shifted", [PARTIAL, WHOLE], PARTIAL),
        ("same", [PARTIAL, WHOLE], PARTIAL),
        ("scaled", [PARTIAL, sharding("x", "")], PARTIAL),
        ("narrow", [PARTIAL], PARTIAL),
        ("padded", [PARTIAL, NUMBER], PARTIAL),
        ("total", [PARTIAL, NUMBER], sharding("", unreduced="x")),
        ("larger", [PARTIAL, WHOLE], PARTIAL),
        ("larger", [PARTIAL, PARTIAL], PARTIAL),
    ],
)
def test_partial_sums_go_nowhere_else(name: str, operands: list[TensorSharding], result: TensorSharding) -> None:
    refusal_of(*by_hand(LINEAR, SUMMED | {name: (operands, result, ())}), name, "linear in its partial operand")


def test_instructions_that_differ_in_a_constant_are_judged_apart() -> None:
    """`padded` is `cleared` but for what it pads with."""
    padded = {name: ([PARTIAL, NUMBER], PARTIAL, ()) for name in ("cleared", "padded")}
    refusal_of(*by_hand(LINEAR, SUMMED | padded), "1 problem(s)", "main/padded")


def test_only_zero_is_partial_from_the_start() -> None:
    check_plan(*by_hand(LINEAR, {"zero": ([], TensorSharding((), ("x",)), ())}))
    refusal_of(*by_hand(LINEAR, {"one": ([], TensorSharding((), ("x",)), ())}), "one", "no factor")
    argument = {"a": ([], sharding("", "", unreduced="x"), ())}
    refusal_of(*by_hand(LINEAR, argument), "parameter 0", "partial")


def test_rows_summed_by_a_lookup_are_reduced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA before `XLA_KEEPS_SUMS` reduces them by itself and would count the sum once for every device."""
    monkeypatch.setattr(linear, "xla_version", lambda: (0, 11, 1))
    table = sharding("x", "")
    entries = {"rows": ([table, INDEX], sharding("", "", unreduced="x"), ())}
    refusal_of(*by_hand(LINEAR, entries), "rows", "looks up")
    check_plan(*by_hand(LINEAR, {"rows": ([table, INDEX], WHOLE, ("x",))}))
    beside = SUMMED | {"rows": ([sharding("y", "", unreduced="x"), INDEX], PARTIAL, ("y",))}
    refusal_of(*by_hand(LINEAR, beside), "rows", "looks up")


def test_a_contracted_factor_needs_its_reduction() -> None:
    whole = sharding("", "")
    check_plan(*by_hand(PRODUCTS, SPLIT | {"first": (OPERANDS, whole, ("x",))}))
    check_plan(*by_hand(PRODUCTS, SPLIT | {"first": (OPERANDS, sharding("x", ""), ("x",))}))
    refusal_of(*by_hand(PRODUCTS, SPLIT | {"first": (OPERANDS, whole, ())}), "first", "no factor")
    refusal_of(*by_hand(PRODUCTS, {"first": (None, whole, ("x",))}), "first", "no factor")
    half = [sharding("", "x"), whole]
    refusal_of(*by_hand(PRODUCTS, SPLIT | {"first": (half, whole, ("x",))}), "first", "no factor")


RESHAPED = """HloModule reshaped, entry_computation_layout={(f32[6,4]{1,0})->f32[6,2,2]{2,1,0}}

ENTRY main {
  a = f32[6,4]{1,0} parameter(0)
  b = f32[6,4]{1,0} negate(a)
  ROOT out = f32[6,2,2]{2,1,0} reshape(b)
}
"""


def test_uneven_splits_where_the_rule_allows_padding() -> None:
    """6 rows over 4 devices are padded element by element; a reshape cannot pad 2 blocks of columns to 4."""
    rows, columns = sharding("y", ""), sharding("", "y")
    check_plan(*by_hand(RESHAPED, {"a": ([], rows, ())}))
    check_plan(*by_hand(RESHAPED, {"a": ([], rows, ()), "b": ([rows], rows, ())}))
    entries = {"a": ([], columns, ()), "b": ([columns], columns, ()), "out": ([columns], sharding("", "y", ""), ())}
    refusal_of(*by_hand(RESHAPED, entries), "out", "2 elements, not divided by 4")


MAXIMUM = """HloModule maximum, entry_computation_layout={(f32[8,16]{1,0})->f32[8]{0}}

region_max {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT m = f32[] maximum(l, r)
}

ENTRY main {
  a = f32[8,16]{1,0} parameter(0)
  low = f32[] constant(-inf)
  ROOT top = f32[8]{0} reduce(a, low), dimensions={1}, to_apply=region_max
}
"""


def test_a_maximum_is_reduced_at_once_and_whole() -> None:
    operands = [sharding("", "x"), TensorSharding(())]
    check_plan(*by_hand(MAXIMUM, {"top": (operands, sharding(""), ("x",))}))
    refusal_of(*by_hand(MAXIMUM, {"top": (operands, sharding("x"), ("x",))}), "top")
    refusal_of(*by_hand(MAXIMUM, {"top": (operands, sharding("", unreduced="x"), ())}), "top")


LOOP = """HloModule loop, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

body {
  carried = (s32[], f32[8,4]{1,0}) parameter(0)
  i = s32[] get-tuple-element(carried), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  v = f32[8,4]{1,0} get-tuple-element(carried), index=1
  w = f32[8,4]{1,0} tanh(v)
  ROOT again = (s32[], f32[8,4]{1,0}) tuple(next, w)
}

condition {
  state = (s32[], f32[8,4]{1,0}) parameter(0)
  j = s32[] get-tuple-element(state), index=0
  limit = s32[] constant(5)
  ROOT less = pred[] compare(j, limit), direction=LT
}

ENTRY main {
  start = f32[8,4]{1,0} parameter(0)
  zero = s32[] constant(0)
  init = (s32[], f32[8,4]{1,0}) tuple(zero, start)
  loop = (s32[], f32[8,4]{1,0}) while(init), condition=condition, body=body
  ROOT end = f32[8,4]{1,0} get-tuple-element(loop), index=1
}
"""


def loop_entries() -> dict[str, Any]:
    number, rows = TensorSharding(()), sharding("x", "")
    carried = (number, rows)
    return {
        "carried": ([], carried, ()),
        "i": ([carried], number, ()),
        "v": ([carried], rows, ()),
        "w": ([rows], rows, ()),
        "again": ([number, rows], carried, ()),
        "state": ([], carried, ()),
        "j": ([carried], number, ()),
        "start": ([], rows, ()),
        "init": ([number, rows], carried, ()),
        "loop": ([carried], carried, ()),
        "end": ([carried], rows, ()),
    }


def test_loops_carry_one_layout() -> None:
    good = loop_entries()
    check_plan(*by_hand(LOOP, good))
    whole = (TensorSharding(()), sharding("", ""))
    for name, place in [("carried", "parameters of body"), ("again", "root of body"), ("state", "condition")]:
        operands, _, _ = good[name]
        refusal_of(*by_hand(LOOP, good | {name: (operands, whole, ())}), "loop", place)
    refusal_of(*by_hand(LOOP, good | {"loop": (good["loop"][0], whole, ())}), "initial value")
    refusal_of(*by_hand(LOOP, good | {"end": (good["end"][0], sharding("", ""), ())}), "end", "element 1")
    refusal_of(*by_hand(LOOP, good | {"init": (good["init"][0], whole, ())}), "init", "its operands")


def test_loops_carry_partial_sums_from_partial_sums() -> None:
    """What enters a loop as partial must be a partial sum, or whole; what ends its body too."""
    number, partial = TensorSharding(()), sharding("", "", unreduced="x")
    carried = (number, partial)
    text = LOOP.replace("tanh", "negate")
    entries = loop_entries() | {
        "carried": ([], carried, ()), "i": ([carried], number, ()), "v": ([carried], partial, ()),
        "w": ([partial], partial, ()), "again": ([number, partial], carried, ()), "state": ([], carried, ()),
        "j": ([carried], number, ()), "start": ([], sharding("x", ""), ()), "init": ([number, partial], carried, ()),
        "loop": ([carried], carried, ()), "end": ([carried], partial, ()),
    }  # fmt: skip
    refusal_of(*by_hand(text, entries), "init", "operand 1 is used as partial")
    entries["start"] = ([], sharding("", ""), ())
    refusal_of(*by_hand(text, entries), "1 problem(s)", "output 0", "partial")
    split = ([sharding("x", "")], sharding("x", ""), ())
    refusal_of(*by_hand(text, entries | {"w": split}), "again", "used as partial")
    refusal_of(*by_hand(text.replace("negate(v)", "tanh(v)"), entries), "w", "linear")
    complex_text = text.replace("f32", "c64")
    refusal_of(*by_hand(complex_text, entries), "init", "start is a whole c64")


def test_the_error_lists_and_counts() -> None:
    module, plan = by_hand(LOOP, {})
    doubled = (*plan.instructions, *plan.instructions)
    with pytest.raises(PlanCheckError, match="more") as caught:
        check_plan(module, replace(plan, instructions=(*doubled, *plan.instructions)))
    assert "problem(s)" in caught.value.message
    assert caught.value.message.count("two entries") == 20
    assert caught.value.where == "plan of loop"
