"""What a loop's body computes the same way every time, and XLA therefore computes once before the loop.

After XLA's WhileLoopInvariantCodeMotion (xla/service/while_loop_invariant_code_motion.cc). Hoisted values are carried
by the loop: they take memory as long as it runs.
"""

from __future__ import annotations

from shardwright.cost.program import Program

#: Computed where they are read: nothing is gained by hoisting them for themselves.
_FREE = frozenset({
    "bitcast", "broadcast", "constant", "get-tuple-element", "iota", "reshape", "reverse", "slice", "transpose",
})  # fmt: skip

#: Never computed ahead: effects, programs of their own, values that are to be kept apart or that several may write.
_STAYS = frozenset({
    "after-all", "call", "conditional", "custom-call", "domain", "infeed", "opt-barrier", "optimization-barrier",
    "outfeed", "parameter", "recv", "rng", "rng-bit-generator", "rng-get-and-update-state", "send", "tuple", "while",
})  # fmt: skip


def hoisted(body: Program, what: str) -> frozenset[int]:
    """Nodes of a loop's body whose values are made before the loop and read in it.

    what: `all`, or a part of it, as hardware profiles name it (`Compiler.hoists_loop_invariants`).
    """
    if what == "none":
        return frozenset()
    invariant = _handed_on(body)
    worth: set[int] = set()
    for node, opcode in enumerate(body.opcodes):
        if opcode in _STAYS or not all(operand in invariant for operand in body.operands[node]):
            continue
        invariant.add(node)
        if _is_worth(opcode, what):
            worth.add(node)
    needed = _read_by_worthy(body, worth)
    return frozenset(
        node for node, users in enumerate(body.users()) if node in worth and any(user not in needed for user in users)
    )


def _is_worth(opcode: str, what: str) -> bool:
    return opcode == "convert" if what == "roundings" else opcode not in _FREE


def _handed_on(body: Program) -> set[int]:
    """The elements of its argument that a body hands on as they are."""
    return {
        node
        for index, node in enumerate(body.operands[body.root])
        if body.opcodes[node] == "get-tuple-element"
        and body.operands[node][0] in body.parameters
        and body.instructions[node].index == index
    }


def _read_by_worthy(body: Program, worth: set[int]) -> set[int]:
    """What runs before the loop: the nodes worth it, and all that they are made of."""
    needed = set(worth)
    for node in range(len(body.opcodes) - 1, -1, -1):
        if node in needed:
            needed.update(body.operands[node])
    return needed
