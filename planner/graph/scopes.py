"""An instruction's place in the user's model: the scopes that JAX writes into `op_name`.

They come from `jax.named_scope` and from modules of Flax and the like; plain functions leave none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from shardwright.hlo import Instruction

#: What JAX's transformations put around a scope, and components that stand for control flow.
_AROUND = re.compile(r"(?:jvp|vmap|transpose|checkpoint|remat|custom_jvp|custom_vjp)\((.*)\)")
_STRUCTURE = re.compile(
    r"|p?jit(\(.*\))?|while|body|cond|branch_\d+_fun|closed_call|checkpoint|remat2?|rematted_computation|shard_map"
)


def scopes_of(op_name: str) -> tuple[str, ...]:
    """`jit(step)/transpose(jvp(block_0))/attention/dot_general` → (`block_0`, `attention`)."""
    scopes = []
    first = op_name.partition(";")[0]  # of several that became one instruction
    for part in first.split("/")[:-1]:
        scope = part
        while (match := _AROUND.fullmatch(scope)) is not None:
            scope = match[1]
        if not _STRUCTURE.fullmatch(scope):
            scopes.append(scope)
    return tuple(scopes)


def scope_range(instructions: Iterable[Instruction], depth: int) -> str:
    """`block_0`, or `embed … block_0`: first and last scope of some instructions, cut at `depth`; "" without any."""
    named = ("/".join(scopes_of(instruction.op_name)[:depth]) for instruction in instructions)
    names = [name for name in dict.fromkeys(named) if name]
    return " … ".join(dict.fromkeys((names[0], names[-1]))) if names else ""


def distinguishing_depth(instructions: Iterable[Instruction]) -> int:
    """Number of scopes needed to tell instructions of a program apart: one more than they all share."""
    paths = [path for instruction in instructions if (path := scopes_of(instruction.op_name))]
    return 1 + sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False)))
