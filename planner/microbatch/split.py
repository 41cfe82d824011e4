"""A training step cut in two: what runs for each micro-batch, and what runs once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, prod

from shardwright.config import PlanOptions
from shardwright.errors import MicroBatchError
from shardwright.hlo import ArrayShape, Instruction, Module
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.microbatch.batch_candidates import batch_candidates
from shardwright.planner.microbatch.demand import Demand, EmitMode, Version
from shardwright.planner.microbatch.kinds import DONE, SUM, WHOLE, Along, Kind, Term
from shardwright.planner.microbatch.labels import KindLabels, Labeller
from shardwright.planner.microbatch.messages import (
    argument_leaves,
    conflict_error,
    describe_argument,
    indivisible_error,
    inexact_note,
)
from shardwright.planner.rewrites.batched_lookups import batch_lookups
from shardwright.planner.strategies.rule_cache import RuleCache

MICRO, ONCE = "micro", "once"

#: Instructions that talk to the host or to other programs.
_EFFECTS = frozenset({"infeed", "outfeed", "recv", "recv-done", "send", "send-done"})

#: Floats whose terms are added up in single precision.
_NARROW = frozenset({"bf16", "f16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedValue:
    """A value that micro-batches make and the once part reads: array leaf `leaf` of instruction `name`.

    kind: `Term` (an accumulator) or `Along` (collected). shape: of the whole value, in the type in which it is added
    up: single precision for narrower floats.
    """

    name: str
    leaf: int
    kind: Term | Along
    shape: ArrayShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """Where a step is cut. Instructions are those of `module`, the program with its calls written out
    and its lookups as `rewrites.batched_lookups` writes them.

    kinds: per instruction of the entry, by name, the kinds of its result's array leaves.
    parts: per instruction of the entry, by name, `micro`, `once`, both (whole values that both read), or nothing.
    batch: per flat argument that carries the batch, the dimension that is cut.
    accumulators / collected: what micro-batches hand to the once part.
    divisor: the number of micro-batches must divide it; tightest: the argument or instruction that says so.
    names: of the flat arguments, where the caller gave them.
    """

    module: Module
    kinds: Mapping[str, tuple[Kind, ...]]
    parts: Mapping[str, frozenset[str]]
    batch: Mapping[int, Along]
    accumulators: tuple[SharedValue, ...]
    collected: tuple[SharedValue, ...]
    divisor: int
    tightest: str
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    micro: Demand = field(repr=False)
    once: Demand = field(repr=False)

    @property
    def shared(self) -> tuple[SharedValue, ...]:
        return (*self.accumulators, *self.collected)

    def check(self, micro_batches: int) -> None:
        """MicroBatchError where the batch does not split into so many equal parts."""
        if micro_batches < 1 or self.divisor % micro_batches:
            raise indivisible_error(self, micro_batches)


def split_step(module: Module, options: PlanOptions | None = None) -> StepSplit:
    """Find the batch, and cut the step into what is linear in it and what is not.

    A value is along the batch, a sum over it (both made by each micro-batch, as its part and its term), the same
    for all micro-batches, or made once: gradients are sums, the optimizer runs once. Where part of the model needs
    something of the whole batch that is no plain arithmetic on the arguments (batch norm's statistics, expert capacity
    over all tokens), no such cut exists.

    Raises MicroBatchError then, and where no argument carries a batch. With `options.micro_batch_inexact` each
    micro-batch takes its own statistics for those of the batch where it can, and runs through its own part alone;
    `notes` say where.
    """
    options = options or PlanOptions()
    with gc_paused():
        module = batch_lookups(inline_calls(module))
        _refuse_effects(module)
        flow = build_dataflow(module)
        refused: list[tuple[tuple[bool, int], dict[int, Along], MicroBatchError]] = []
        order = {instruction: number for number, instruction in enumerate(module.entry.instructions)}
        for batch in batch_candidates(flow, options):
            labeller, labels = label_step(module, batch)
            if labels.conflicts:
                is_usual = all(along.dim == 0 for along in batch.values())
                rank = (is_usual, order[labels.conflicts[0]])
                refused.append((rank, batch, conflict_error(module, labeller, labels)))
                continue
            found = cut_step(module, batch, labeller, labels, options.argument_names)
            if any(MICRO in parts for parts in found.parts.values()):
                return found
        if not refused:
            raise MicroBatchError(
                "no argument carries a batch: nothing is computed for each element of one that is not kept for later",
                where="micro_batches",
                remedy="hand the batch to the step as an argument that is not donated",
            )
        _, batch, error = max(refused, key=lambda found: found[0])  # the guess that went furthest
        if options.micro_batch_inexact:
            labeller, labels = label_step(module, batch, inexact=True)
            if not labels.conflicts:
                return cut_step(module, batch, labeller, labels, options.argument_names)
            error = conflict_error(module, labeller, labels)
        raise error


def _refuse_effects(module: Module) -> None:
    """MicroBatchError where something happens besides what is computed: as often as the step runs, no more."""
    for instruction in module.instructions():
        if instruction.opcode in _EFFECTS or instruction.get("custom_call_has_side_effect", False):
            place = module.source(instruction) or instruction.op_name
            raise MicroBatchError(
                f"{instruction.opcode} {instruction.name} has an effect beside its result, once a step",
                where=f"{instruction.name}, {place}" if place else instruction.name,
                remedy="leave it out of the step, or plan without micro-batches",
            )


def label_step(
    module: Module, batch: Mapping[int, Along], *, inexact: bool = False, rules: RuleCache | None = None
) -> tuple[Labeller, KindLabels]:
    """The kinds of all values where these flat arguments carry the batch. inexact, rules: see `Labeller`."""
    kinds: dict[Instruction, tuple[Kind, ...]] = {}
    number, most = 0, 0
    for parameter in sorted(module.entry.parameters, key=lambda p: p.index):
        leaves = parameter.shape.leaves
        kinds[parameter] = tuple(batch.get(number + leaf, WHOLE) for leaf in range(len(leaves)))
        most = max([most, *(prod(leaf.dimensions) for i, leaf in enumerate(leaves) if number + i in batch)])
        number += len(leaves)
    labeller = Labeller(most_early=most, inexact=inexact, rules=rules)
    return labeller, labeller.entry(module.entry, kinds)


def cut_step(
    module: Module, batch: Mapping[int, Along], labeller: Labeller, labels: KindLabels, names: tuple[str, ...] = ()
) -> StepSplit:
    """The step cut as labelled; `names` of its flat arguments.

    `labels` are changed: what costs nothing to finish early becomes done.
    """
    _finish_early(labels)
    root = module.entry.root
    once = Demand(labels, labeller, tuple((root, leaf, DONE) for leaf in range(len(root.shape.leaves))))
    shared = [_to_shared(labels, version) for version in once.inputs() if version[2] == DONE]
    accumulators = tuple(each for each in shared if isinstance(each.kind, Term))
    collected = tuple(each for each in shared if isinstance(each.kind, Along))
    by_name = {instruction.name: instruction for instruction in module.entry}
    micro = Demand(
        labels, labeller, tuple((by_name[each.name], each.leaf, each.kind) for each in (*accumulators, *collected))
    )
    divisor, tightest = _divisor(micro, batch, module, names)
    return StepSplit(
        module=module,
        kinds={instruction.name: kinds for instruction, kinds in labels.kinds.items()},
        parts=_parts(labels, micro, once),
        batch=batch,
        accumulators=accumulators,
        collected=collected,
        divisor=divisor,
        tightest=tightest,
        notes=tuple(inexact_note(module, each) for each in labeller.inexact_sites),
        names=names,
        micro=micro,
        once=once,
    )


def _to_shared(labels: KindLabels, version: Version) -> SharedValue:
    instruction, leaf, _ = version
    kind = labels.kinds[instruction][leaf]
    shape = instruction.shape.leaves[leaf]
    assert isinstance(kind, Term | Along)
    if kind == SUM and shape.element_type in _NARROW:
        shape = ArrayShape("f32", shape.dimensions, (), shape.layout)
    return SharedValue(name=instruction.name, leaf=leaf, kind=kind, shape=shape)


def _divisor(micro: Demand, batch: Mapping[int, Along], module: Module, names: tuple[str, ...]) -> tuple[int, str]:
    leaves = argument_leaves(module)
    found = [(leaves[n].dimensions[along.dim], describe_argument(module, names, n)) for n, along in batch.items()]
    found += [(size, f"{i.opcode} {i.name}") for size, i in micro.divisors()]
    divisor = gcd(*(size for size, _ in found))
    return divisor, min(found, key=lambda each: each[0])[1]


def _parts(labels: KindLabels, micro: Demand, once: Demand) -> dict[str, frozenset[str]]:
    def is_computed(demand: Demand, instruction: Instruction) -> bool:
        return any(recipe.mode is not EmitMode.GIVEN for recipe in demand.recipes.get(instruction, ()))

    return {
        instruction.name: frozenset(
            part for part, demand in ((MICRO, micro), (ONCE, once)) if is_computed(demand, instruction)
        )
        for instruction in labels.computation
    }


# ---- what is finished as early as that costs nothing -------------------------------

#: Linear in one operand, and no smaller than it: once on the sum does as much as on every term.
_SINKING = frozenset(
    {"add", "broadcast", "copy", "divide", "multiply", "negate", "pad", "reshape", "subtract", "transpose"}
)


def _finish_early(labels: KindLabels) -> None:
    """Whatever only follows a sum, and makes nothing smaller of it, is left to the once part."""
    users: dict[Instruction, list[Instruction]] = {}
    for instruction in labels.computation:
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)
    root = labels.computation.root
    for instruction in reversed(labels.computation.instructions):
        if labels.kinds[instruction] != (SUM,) or instruction.opcode not in _SINKING:
            continue
        terms = [operand for operand in instruction.operands if labels.kinds[operand] == (SUM,)]
        if len(terms) != 1 or terms[0].shape.size_bytes > instruction.shape.size_bytes:
            continue
        if all(user is root or DONE in labels.kinds[user] for user in users.get(instruction, ())):
            labels.kinds[instruction] = (DONE,)
