"""Gradients of embedding tables as the rows that are not zero: `allreduce` sends these, not the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.errors import OptionError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseRows:
    """A table of `num_rows` rows that is zero but at `indices`; rows of an index that comes twice add up.

    indices: int32 [n]; those from `num_rows` on count for nothing. rows: [n, …]. A tree of JAX with two leaves.
    """

    indices: Any
    rows: Any
    num_rows: int = field(metadata={"static": True})

    @classmethod
    def of(cls, gradient: Any, ids: Any) -> SparseRows:
        """The rows of a table's gradient that a batch has touched.

        gradient: [rows, …], zero but at `ids`: what `jax.grad` gives for `table[ids]`. ids: whole numbers of any
        shape, each with its row once in the result. Traced or not.
        """
        if gradient.ndim < 1:
            raise OptionError("the gradient of a table has rows", where="gradient", remedy="pass the table's own")
        num_rows = int(gradient.shape[0])
        flat = jnp.ravel(jnp.asarray(ids))
        flat = jnp.where(flat < 0, flat + num_rows, flat)
        indices = jnp.unique(flat, size=flat.size, fill_value=num_rows).astype(jnp.int32)
        return cls(
            indices=indices, rows=jnp.asarray(gradient).at[indices].get(mode="fill", fill_value=0), num_rows=num_rows
        )

    def to_dense(self) -> jax.Array:
        """The table, [num_rows, …]."""
        rows = jnp.asarray(self.rows)
        table = jnp.zeros((self.num_rows, *rows.shape[1:]), rows.dtype)
        return table.at[jnp.asarray(self.indices)].add(rows, mode="drop")


def is_sparse(value: Any) -> bool:
    """Whether a leaf of gradients is sparse."""
    return isinstance(value, SparseRows)
