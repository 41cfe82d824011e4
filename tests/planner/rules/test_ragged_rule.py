"""Ragged products, which XLA:CPU does not run: blocks against the whole in JAX, and what XLA's partitioner makes."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.planner.rules import Factor
from shardwright.plans.shardings import Mesh
from tests.planner.rules.rule_cases import Case, Trial, cases_of
from tests.planner.rules.rule_texts import RAGGED
from tests.planner.rules.rule_validator import partition_text

CASES = {name: cases_of({name: text})[0] for name, text in RAGGED.items()}
PAIRS = [(name, factor) for name, case in CASES.items() for factor in case.factors]
IDS = [f"{name}-{factor.name}" for name, factor in PAIRS]


def _dimensions(case: Case) -> lax.RaggedDotDimensionNumbers:
    get = case.instruction.get
    contracting = get("lhs_contracting_dims"), get("rhs_contracting_dims")
    batch = get("lhs_batch_dims", ()), get("rhs_batch_dims", ())
    return lax.RaggedDotDimensionNumbers((contracting, batch), get("lhs_ragged_dims"), get("rhs_group_dims", ()))


def _operands(case: Case) -> list[np.ndarray]:
    """Random matrices and groups that cover the ragged dimension."""
    random = np.random.default_rng(0)
    lhs, rhs, groups = (operand.shape.leaves[0].dimensions for operand in case.instruction.operands)
    rows = lhs[case.instruction.get("lhs_ragged_dims")[0]]
    sizes = random.multinomial(rows, np.full(groups[-1], 1 / groups[-1]), size=groups[:-1])
    return [random.normal(size=lhs), random.normal(size=rhs), sizes.astype(np.int32)]


def _blocks(array: np.ndarray, dim: int | None, parts: int) -> list[np.ndarray]:
    return [array] * parts if dim is None else np.split(array, parts, dim)


@pytest.mark.parametrize(("name", "factor"), PAIRS, ids=IDS)
def test_blocks_make_the_whole(name: str, factor: Factor) -> None:
    def product(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return lax.ragged_dot_general(jnp.float32(lhs), jnp.float32(rhs), jnp.int32(sizes), _dimensions(CASES[name]))

    operands = _operands(CASES[name])
    blocks = zip(*(_blocks(a, dim, 4) for a, dim in zip(operands, factor.operands, strict=True)), strict=True)
    results = [np.asarray(product(*block)) for block in blocks]
    whole = np.sum(results, axis=0) if factor.contracted else np.concatenate(results, factor.results[0])
    np.testing.assert_allclose(whole, product(*operands), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "factor"), PAIRS, ids=IDS)
def test_xla_splits_it_with_the_promised_collectives(name: str, factor: Factor) -> None:
    text = partition_text(Trial(CASES[name], {"x": factor, "y": None}, Mesh.of({"x": 4, "y": 2})))
    kinds = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", text)
    assert kinds == (["all-reduce"] if factor.contracted else [])
