"""Splitting dimensions: which are found, what is kept, and that the program computes the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import PlanError
from shardwright.hlo import Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.rewrites import Required, Rewritten, rewrite, rewrite_for
from shardwright.planner.rewrites.dim_classes import _cut_classes, _Graph
from shardwright.reserved_names import ANNOTATION_TARGET
from shardwright.xla import private
from tests.planner.programs import lower, mlp
from tests.planner.rewrites.rewrite_programs import REWRITTEN, run

#: Per program: how many arguments get which dimensions.
VIEWS = {
    "gpt2": {(3, 32): 2, (32, 3, 32): 2},
    "lstm": {(4, 16): 2, (16, 4, 16): 4},
    "glu": {(16, 2, 24): 2},
    "gqa": {(16, 4, 8): 2},
    "stacked": {(3, 3, 16): 2, (3, 16, 3, 16): 2},
    "nested": {(16, 2, 2, 8): 2},
    "joined": {(3, 16, 8): 2},
}


def lower_text(function: Any, *arguments: Any) -> Module:
    return parse(str(jax.jit(function).lower(*arguments).as_text("hlo")))


def assert_same(module: Module, rewritten: Rewritten, arguments: list[np.ndarray]) -> None:
    """Both programs give the same numbers on one device, in the dimensions that the rewrite states."""
    text = rewritten.module.to_text()
    private.canonical_hlo(text)  # XLA reads it
    expected = run(module.to_text(), arguments)
    result = run(text, [a.reshape(rewritten.parameters.get(n, a.shape)) for n, a in enumerate(arguments)])
    for number, (e, f) in enumerate(zip(expected, result, strict=True)):
        assert f.shape == rewritten.outputs.get(number, e.shape)
        np.testing.assert_allclose(f.reshape(e.shape), e, rtol=2e-6, atol=2e-7)


@pytest.mark.dear
@pytest.mark.parametrize("name", REWRITTEN)
def test_fused_weights_are_split_and_compute_the_same(name: str) -> None:
    program = REWRITTEN[name]()
    module = parse(lower(program))
    rewritten_module = rewrite(module)
    views = list(rewritten_module.parameters.values())
    assert {view: views.count(view) for view in views} == VIEWS[name]
    assert_same(module, rewritten_module, [np.asarray(leaf) for leaf in jax.tree.leaves(program[1])])


def _first_and_last(x: jax.Array) -> jax.Array:
    """Single elements of the second dimension, one for itself each."""
    return x[:, 0] * 2.0 + x[:, 3]


def test_what_is_cut_into_single_elements_splits_what_a_reshape_merges_it_into() -> None:
    module = lower_text(lambda x, w: _first_and_last((x @ w).reshape(8, 4, 8)), jnp.ones((8, 16)), jnp.ones((16, 32)))
    rewritten_module = rewrite(module)
    assert dict(rewritten_module.parameters) == {1: (16, 4, 8)}
    arguments = [
        np.arange(size, dtype=np.float32).reshape(shape) / size for size, shape in ((128, (8, 16)), (512, (16, 32)))
    ]
    assert_same(module, rewritten_module, arguments)


def test_what_is_cut_into_single_elements_is_not_followed_for_itself() -> None:
    """No class of dimensions begins there."""
    module = lower_text(lambda x: _first_and_last(jnp.sin(x)), jnp.ones((8, 4, 8)))
    assert rewrite(module).module is module
    assert not _cut_classes(_Graph(module), {})
    halves = lower_text(lambda x: jnp.sin(x)[:, :2] * jnp.cos(x)[:, 2:], jnp.ones((8, 4, 8)))
    assert _cut_classes(_Graph(halves), {})


def test_instructions_keep_names_metadata_and_tables() -> None:
    module = parse(lower(REWRITTEN["gpt2"]()))
    result = rewrite(module).module
    after = {instruction.name: instruction for instruction in result.instructions()}
    assert len(after) == sum(1 for _ in result.instructions())
    for old in module.instructions():
        new = after.pop(old.name)
        assert (new.opcode, new.op_name) == (old.opcode, old.op_name)
        assert result.source(new) == module.source(old)
    assert {instruction.opcode for instruction in after.values()} == {"reshape"}


def test_program_without_fused_dimensions_is_given_back() -> None:
    module = parse(lower(mlp()))
    rewritten_module = rewrite(module)
    assert rewritten_module.module is module
    assert not rewritten_module.changed


def annotated(pins: str) -> Module:
    return parse(f"""HloModule m

ENTRY main {{
  x = f32[4,32]{{1,0}} parameter(0)
  pinned = f32[4,32]{{1,0}} custom-call(x), custom_call_target="{ANNOTATION_TARGET}",
    operand_layout_constraints={{f32[4,32]{{1,0}}}}, api_version=API_VERSION_STATUS_RETURNING, backend_config="{pins}"
  y = f32[4,32]{{1,0}} add(x, pinned)
  a = f32[4,16]{{1,0}} slice(y), slice={{[0:4], [0:16]}}
  b = f32[4,16]{{1,0}} slice(y), slice={{[0:4], [16:32]}}
  ROOT z = f32[4,16]{{1,0}} add(a, b)
}}
""")


def test_annotated_dimension_stays_as_the_user_speaks_of_it() -> None:
    module = annotated("0:data,1:model")
    rewritten_module = rewrite(module)
    assert rewritten_module.module is module
    assert rewritten_module.notes == (
        "y: dimension 1 holds 2 blocks of 16 but stays whole: custom-call pinned takes no split",
    )


def test_annotation_of_other_dimensions_is_renumbered() -> None:
    rewritten_module = rewrite(annotated("0:data,1:-"))
    assert rewritten_module.parameters == {0: (4, 2, 16)}
    (pinned,) = (i for i in rewritten_module.module.instructions() if i.opcode == "custom-call")
    assert pinned.get("backend_config") == "0:data,1:-,2:-"
    assert pinned.attributes["operand_layout_constraints"].text == "{f32[4,2,16]{2,1,0}}"
    private.canonical_hlo(rewritten_module.module.to_text())


# ---- variables that lie already ----------------------------------------------


def halves(x: Any, w: Any) -> Any:
    a, b = jnp.split(x @ w, 2, axis=-1)
    return a * b, w + 1


ARGUMENTS = [np.random.default_rng(n).normal(size=size).astype(np.float32) for n, size in enumerate([(4, 8), (8, 32)])]


def test_argument_that_lies_as_written_stays() -> None:
    module = lower_text(halves, *ARGUMENTS)
    rewritten_module = rewrite(module, Required(parameters={1: (8, 32)}))
    assert rewritten_module.module is module
    assert "stored otherwise already" in rewritten_module.notes[0]


def test_argument_that_lies_in_the_view_is_taken_so() -> None:
    module = lower_text(halves, *ARGUMENTS)
    rewritten_module = rewrite(module, Required(parameters={1: (8, 2, 16)}))
    assert rewritten_module.parameters == {1: (8, 2, 16)}
    assert rewritten_module.outputs == {1: (8, 2, 16)}
    assert_same(module, rewritten_module, ARGUMENTS)


def test_coarser_view_than_the_program_would_choose() -> None:
    def quarters(x: Any, w: Any) -> Any:
        return tuple(jnp.split(x @ w, 4, axis=-1))

    module = lower_text(quarters, *ARGUMENTS)
    assert rewrite(module).parameters == {1: (8, 4, 8)}
    rewritten_module = rewrite(module, Required(parameters={1: (8, 2, 16)}))
    assert rewritten_module.parameters == {1: (8, 2, 16)}
    assert_same(module, rewritten_module, ARGUMENTS)


@pytest.mark.parametrize(
    "view", [(8, 4, 8), (2, 4, 32), (256,)], ids=["as the program cannot", "another dimension", "flat"]
)
def test_argument_in_a_foreign_view_is_reshaped_where_it_enters(view: tuple[int, ...]) -> None:
    def thirds(x: Any, w: Any) -> Any:
        y = jax.lax.cumsum(x @ w, 1)  # takes no split
        return y, w * 2

    module = lower_text(thirds, *ARGUMENTS)
    rewritten_module = rewrite(module, Required(parameters={1: view}, outputs={1: view}))
    assert rewritten_module.parameters[1] == view
    assert rewritten_module.outputs == {1: view}
    assert_same(module, rewritten_module, ARGUMENTS)


@pytest.mark.parametrize("function", [lambda w: w * 2, lambda w: jax.lax.cumsum(w, 1)], ids=["follows", "cannot"])
@pytest.mark.parametrize("required", [Required(parameters={0: (8, 2, 16)}), Required(outputs={0: (8, 2, 16)})])
def test_output_shares_the_view_of_the_argument_whose_buffer_it_takes(function: Any, required: Required) -> None:
    text = str(jax.jit(function, donate_argnums=0).lower(ARGUMENTS[1]).as_text("hlo"))
    rewritten_module = rewrite(parse(text), required)
    assert rewritten_module.parameters == rewritten_module.outputs == {0: (8, 2, 16)}
    assert_same(parse(text), rewritten_module, ARGUMENTS[1:])


def test_output_in_an_arguments_buffer_follows_even_if_it_is_made_of_something_else() -> None:
    def reset(w: Any, x: Any) -> Any:
        a, b = jnp.split(x @ w, 2, axis=-1)
        return jnp.full_like(w, 0.5), a * b

    text = str(jax.jit(reset, donate_argnums=0).lower(ARGUMENTS[1], ARGUMENTS[0]).as_text("hlo"))
    rewritten_module = rewrite(parse(text))
    assert rewritten_module.parameters == rewritten_module.outputs == {0: (8, 2, 16)}
    assert_same(parse(text), rewritten_module, ARGUMENTS[::-1])


def test_initializer_makes_its_output_in_the_view() -> None:
    module = lower_text(lambda key: jax.random.normal(jax.random.wrap_key_data(key), (8, 32)), np.zeros(2, np.uint32))
    rewritten_module = rewrite(module, Required(outputs={0: (8, 2, 16)}))
    assert rewritten_module.outputs == {0: (8, 2, 16)}
    assert_same(module, rewritten_module, [np.array([1, 2], np.uint32)])


def test_view_of_other_elements_is_refused() -> None:
    with pytest.raises(PlanError, match=r"argument 1 is \[8, 32\] in the program and cannot be stored as \[8, 3, 16\]"):
        rewrite(lower_text(halves, *ARGUMENTS), Required(parameters={1: (8, 3, 16)}))


def test_options_say_what_must_stay() -> None:
    module = lower_text(halves, *ARGUMENTS)
    free = rewrite_for(module, PlanOptions())
    assert free.parameters == {1: (8, 2, 16)}
    lying = PlanOptions(mesh={"data": 8}, argument_axes={1: ((), ("data",))})
    assert rewrite_for(module, lying).module is module
    viewed = PlanOptions(mesh={"data": 8}, argument_axes={1: ((), (), ("data",))}, argument_views={1: (8, 2, 16)})
    assert rewrite_for(module, viewed).parameters == {1: (8, 2, 16)}
    assert rewrite_for(module, PlanOptions(), pinned_arguments=[1]).module is module


def test_no_rewrites_means_none_but_for_arrays_that_lie_in_a_view() -> None:
    module = lower_text(halves, *ARGUMENTS)
    assert rewrite_for(module, PlanOptions(rewrites="none")).module is module
    viewed = PlanOptions(
        mesh={"data": 8}, argument_axes={1: ((), (), ("data",))}, argument_views={1: (8, 2, 16)}, rewrites="none"
    )
    result = rewrite_for(module, viewed)
    assert result.parameters == {1: (8, 2, 16)}
    assert not result.outputs
    assert_same(module, result, ARGUMENTS)
