"""What is written into a user's source: the right expression, and text that Python reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shardwright.explicit.expressions import SourceText, read_source

HEAD = "import jax\nimport jax.numpy as jnp\n"


def written(line: str, opcode: str, form: str = "out_sharding", at: str = "") -> str:
    """`line` with `P(0)` written into the expression of this opcode that begins at `at`, or with the line."""
    source = SourceText(HEAD + line)
    expression = source.expressions((3, line.index(at)), opcode)[0]
    insertions = expression.with_out_sharding("P(0)") if form == "out_sharding" else expression.resharded("P(0)")
    text = source.insert(list(insertions))
    ast.parse(text)
    return text.removeprefix(HEAD)


@pytest.mark.parametrize(
    ("line", "opcode", "after"),
    [
        ("x @ w + b", "dot", "jnp.matmul(x , w, out_sharding=P(0)) + b"),
        ("(x * 2)@w", "dot", "jnp.matmul((x * 2),w, out_sharding=P(0))"),
        ("jnp.einsum('ab,bc->ac', x, w) - y", "dot", "jnp.einsum('ab,bc->ac', x, w, out_sharding=P(0)) - y"),
        ("jnp.einsum('ab,bc->ac', x, w,)", "dot", "jnp.einsum('ab,bc->ac', x, w,out_sharding=P(0))"),
        ("jnp.matmul(x, w, out_sharding=P(1))", "dot", "jnp.matmul(x, w, out_sharding=P(0))"),
        ("w['table'][ids]", "gather", "w['table'].at[ids].get(out_sharding=P(0))"),
        ("w['table'].at[ids].get()", "gather", "w['table'].at[ids].get(out_sharding=P(0))"),
        ("x.reshape(2, -1).sum()", "reshape", "x.reshape(2, -1, out_sharding=P(0)).sum()"),
        ("jnp.zeros((2, 3))", "broadcast", "jnp.zeros((2, 3), out_sharding=P(0))"),
        ("'größer'; x@w", "dot", "'größer'; jnp.matmul(x,w, out_sharding=P(0))"),
    ],
)
def test_the_call_is_told_its_results_sharding(line: str, opcode: str, after: str) -> None:
    if "größer" in line:  # columns are in bytes
        source = SourceText(HEAD + line)
        expression = source.expressions((3, len("'größer'; ".encode())), opcode)[0]
        assert source.insert(list(expression.with_out_sharding("P(0)"))) == HEAD + after
    else:
        assert written(line, opcode) == after


def test_a_reshard_lies_around_what_is_written_within() -> None:
    source = SourceText(HEAD + "y = f(x @ w)[i]")
    (product,) = source.expressions((3, 6), "dot")
    (lookup,) = source.expressions((3, 4), "gather")
    left = product.arguments()[0]
    insertions = [
        *lookup.resharded("P(3)"),
        *lookup.with_out_sharding("P(2)"),
        *product.with_out_sharding("P(1)"),
        *left.resharded("P(0)"),
    ]
    assert source.insert(insertions).removeprefix(HEAD) == (
        "y = jax.sharding.reshard(f(jnp.matmul(jax.sharding.reshard(x, P(0)) , w, out_sharding=P(1)))"
        ".at[i].get(out_sharding=P(2)), P(3))"
    )


def test_of_several_products_that_begin_alike_the_inner_comes_first() -> None:
    source = SourceText(HEAD + "a * b * c")
    assert [each.text for each in source.expressions((3, 0), "multiply")] == ["a * b", "a * b * c"]


def test_a_method_is_called_on_its_array_and_a_module_is_none() -> None:
    source = SourceText(HEAD + "x.mean(0) + jnp.sum(y)")
    assert [each.text for each in source.expressions((3, 0), "reduce")[0].arguments()] == ["x"]
    assert [each.text for each in source.expressions((3, 12), "reduce")[0].arguments()] == ["y"]


@pytest.mark.parametrize("contents", [None, b"\xff\xfe\x00", b"def (", b"x\0y"])
def test_a_file_that_is_no_python_here_has_no_expressions(tmp_path: Path, contents: bytes | None) -> None:
    file = tmp_path / "model.py"
    if contents is not None:
        file.write_bytes(contents)
    assert read_source(str(file)) is None
