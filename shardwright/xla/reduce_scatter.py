"""Recognizes reduce-scatters that XLA:CPU leaves as an all-reduce with a slice kept on each device.

GPU and TPU turn the pair into one reduce-scatter; XLA:CPU does not, and traffic counted from a CPU compile needs a
correction. The pair is an all-reduce whose every use, through copies and into fusions, is a dynamic-slice at an offset
dependent on `partition-id`. Not through a padding or a slice: no compiler joins the three (`MatchReduceScatter` in
XLA's `reduce_scatter_utils.cc` looks through reshapes only); a sum padded to uneven shards is an all-reduce.
All-reduces over one mesh axis after the other before the slice are a chain of reduce-scatters: the second one's operand
was split by the first.
"""

from __future__ import annotations

from shardwright.hlo import Computation, Instruction, Module
from shardwright.xla.tuning import OFFSET_LIMIT

_PASSING = frozenset({"bitcast", "reshape", "copy", "convert", "transpose", "get-tuple-element"})


class Users:
    """Users of an instruction, and call sites of its computation."""

    def __init__(self, module: Module) -> None:
        self.of: dict[Instruction, list[Instruction]] = {}
        self.home: dict[Instruction, Computation] = {}
        self.fusion: dict[Computation, Instruction] = {}  # computation → the fusion or call that runs it
        self.loop: dict[Computation, Instruction] = {}  # body → its while
        for computation in module.computations:
            for instruction in computation:
                self.home[instruction] = computation
                for operand in dict.fromkeys(instruction.operands):
                    self.of.setdefault(operand, []).append(instruction)
                if instruction.opcode in ("fusion", "call"):
                    for called in (*instruction.called.get("calls", ()), *instruction.called.get("to_apply", ())):
                        self.fusion[called] = instruction
                if instruction.opcode == "while":
                    self.loop.update(dict.fromkeys(instruction.called["body"], instruction))


def find_kept_slices(all_reduce: Instruction, users: Users) -> list[Instruction]:
    """The dynamic-slices, at device-dependent offsets, at the end of every use of an all-reduce; none if some use takes
    all of it.
    """
    return _collect_slices(all_reduce, users) or []


def find_inner_all_reduce(all_reduce: Instruction) -> Instruction | None:
    """The all-reduce whose result this one reduces further, over another mesh axis."""
    value = all_reduce.operands[0] if len(all_reduce.operands) == 1 else all_reduce
    while value.opcode in _PASSING and value.operands:
        value = value.operands[0]
    return value if value.opcode == "all-reduce" and value is not all_reduce else None


def _collect_slices(value: Instruction, users: Users) -> list[Instruction] | None:
    following = users.of.get(value, [])
    is_fusion_root = value.is_root and users.home[value] in users.fusion
    ends_here = not following or value.is_root
    if ends_here and not is_fusion_root:
        return None
    kept_slices: list[Instruction] = []
    outside = [_collect_slices(users.fusion[users.home[value]], users)] if is_fusion_root else []
    for slices in [*(_slices(value, user, users) for user in following), *outside]:
        if slices is None:
            return None
        kept_slices += slices
    return kept_slices


def _slices(value: Instruction, user: Instruction, users: Users) -> list[Instruction] | None:
    if user.operands.count(value) != 1:
        return None
    if user.opcode == "dynamic-slice":
        is_sliced = user.operands[0] is value and any(
            _depends_on_partition(index, users) for index in user.operands[1:]
        )
        return [user] if is_sliced else None
    if user.opcode in _PASSING or (user.opcode == "all-reduce" and len(user.operands) == 1):
        return _collect_slices(user, users) if user.operands[0] is value else None
    if user.opcode in ("fusion", "call"):
        called = (*user.called.get("calls", ()), *user.called.get("to_apply", ()))
        place = user.operands.index(value)
        parameter = next((parameter for parameter in called[0].parameters if parameter.index == place), None)
        return None if parameter is None else _collect_slices(parameter, users)
    return None


def _depends_on_partition(offset: Instruction, users: Users) -> bool:
    """Whether a value is computed from `partition-id`."""
    pending, seen = [offset], {offset}
    while pending and len(seen) < OFFSET_LIMIT:
        value = pending.pop()
        if value.opcode == "partition-id":
            return True
        before = sources(value, users)
        pending += [source for source in before if source not in seen]
        seen.update(before)
    return False


def sources(value: Instruction, users: Users) -> list[Instruction]:
    """The sources of a value, looking out of fusions and of loops that only carry it."""
    home = users.home[value]
    if value.opcode == "parameter" and home in users.fusion:
        caller = users.fusion[home]
        return [caller.operands[value.index]] if value.index < len(caller.operands) else []
    if value.opcode == "get-tuple-element" and value.operands[0].opcode == "parameter" and home in users.loop:
        start = users.loop[home].operands[0]
        return [start.operands[value.index]] if start.opcode == "tuple" else []
    return list(value.operands)
