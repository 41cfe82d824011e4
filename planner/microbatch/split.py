"""A training step cut in two: one part per micro-batch, and one that runs once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, prod

from shardwright.errors import MicroBatchError
from shardwright.hlo import ArrayShape, Instruction, Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.graph.manual_regions import find_inside
from shardwright.planner.microbatch.batch_candidates import batch_candidates, tie_dims
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
NARROW = frozenset({"bf16", "f16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedValue:
    """A value from the micro-batches to the once part: array leaf `leaf` of instruction `name`.

    kind: `Term` (an accumulator) or `Along` (collected).
    shape: of the whole value, in its accumulation type: single precision for narrower floats.
    """

    name: str
    leaf: int
    kind: Term | Along
    shape: ArrayShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """The cut of a step.

    module: the program with its calls inlined and its lookups batched (`rewrites.batched_lookups`); all instructions
        below are its.
    kinds: per instruction of the entry, by name, the kinds of its result's array leaves.
    parts: per instruction of the entry, by name, `micro`, `once`, both (whole values with consumers in both), or
        nothing.
    batch: per flat argument with the batch, the dimension that is cut.
    accumulators: terms from the micro-batches to the once part.
    collected: parts from the micro-batches to the once part.
    divisor: a multiple of every legal number of micro-batches.
    tightest: the argument or instruction with the smallest divisor.
    notes: the inexact sites, for people.
    names: the caller's names of the flat arguments, or none.
    micro: the demand of one micro-batch.
    once: the demand of the once part.
    ahead: what micro-batches read and every one would compute alike: arrays that are computed once, ahead of them.
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
    ahead: tuple[Version, ...] = field(default=(), repr=False)

    @property
    def shared(self) -> tuple[SharedValue, ...]:
        return (*self.accumulators, *self.collected)

    def check(self, micro_batches: int) -> None:
        """Raises MicroBatchError for a number of micro-batches that does not divide the batch."""
        if micro_batches < 1 or self.divisor % micro_batches:
            raise indivisible_error(self, micro_batches)


def split_step(module: Module, options: PlanOptions | None = None) -> StepSplit:
    """Find the batch, and cut the step into its linear part over the batch and the rest.

    A value is one of: a part of the batch or a sum over it (each micro-batch makes its part or its term); the same for
    all micro-batches; made once. Gradients are sums; the optimizer runs once. No such cut exists for a model that needs
    a function of the whole batch beyond plain arithmetic on the arguments: batch norm's statistics, expert capacity
    over all tokens.

    `options.micro_batch_inexact`: each micro-batch uses its own statistics in place of the batch's, and runs through
    its own part alone; `notes` lists the places.

    Raises MicroBatchError without such a cut, and without an argument that carries a batch.
    """
    options = options or PlanOptions()
    with gc_paused():
        module = batch_lookups(inline_calls(module))
        _refuse_effects(module)
        flow = build_dataflow(module)
        refused: list[tuple[tuple[bool, int], dict[int, Along], MicroBatchError]] = []
        order = {instruction: number for number, instruction in enumerate(module.entry.instructions)}
        rules = RuleCache()
        rules.inside = find_inside(module)
        for batch in batch_candidates(flow, options, tie_dims(flow, rules)):
            labeller, labels = label_step(module, batch, rules=rules)
            if labels.conflicts:
                is_usual = all(along.dim == 0 for along in batch.values())
                rank = (is_usual, order[labels.conflicts[0]])
                refused.append((rank, batch, conflict_error(module, labeller, labels)))
                continue
            split = cut_step(module, batch, labeller, labels, options.argument_names)
            if any(MICRO in parts for parts in split.parts.values()):
                return split
        if not refused:
            raise MicroBatchError(
                "no argument carries a batch: nothing is computed for each element of one that is not kept for later",
                where="micro_batches",
                remedy="hand the batch to the step as an argument that is not donated",
            )
        _, batch, error = max(refused, key=lambda refusal: refusal[0])  # the candidate with the latest conflict
        if options.micro_batch_inexact:
            labeller, labels = label_step(module, batch, inexact=True, rules=rules)
            if not labels.conflicts:
                return cut_step(module, batch, labeller, labels, options.argument_names)
            error = conflict_error(module, labeller, labels)
        raise error


def _refuse_effects(module: Module) -> None:
    """Raises MicroBatchError for side effects: they happen once per step, no more."""
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
    """The kinds of all values, for these flat arguments with the batch. inexact, rules: see `Labeller`."""
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
    """The step cut by its labels; `names`: those of its flat arguments.

    Changes `labels`: values cheap to finish early become done.
    """
    _finish_early(labels)
    root = module.entry.root
    once = Demand(labels, labeller, tuple((root, leaf, DONE) for leaf in range(len(root.shape.leaves))))
    shared = [_to_shared(labels, version) for version in once.inputs() if version[2] == DONE]
    accumulators = tuple(value for value in shared if isinstance(value.kind, Term))
    collected = tuple(value for value in shared if isinstance(value.kind, Along))
    by_name = {instruction.name: instruction for instruction in module.entry}
    micro = Demand(
        labels, labeller, tuple((by_name[value.name], value.leaf, value.kind) for value in (*accumulators, *collected))
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
        notes=tuple(inexact_note(module, site) for site in labeller.inexact_sites),
        names=names,
        micro=micro,
        once=once,
        ahead=tuple(micro.computable_once(_state_versions(module, batch))),
    )


def _state_versions(module: Module, batch: Mapping[int, Along]) -> frozenset[Version]:
    """The arguments without the batch, whole."""
    versions, number = [], 0
    for parameter in sorted(module.entry.parameters, key=lambda p: p.index):
        for leaf in range(len(parameter.shape.leaves)):
            if number not in batch:
                versions.append((parameter, leaf, WHOLE))
            number += 1
    return frozenset(versions)


def _to_shared(labels: KindLabels, version: Version) -> SharedValue:
    instruction, leaf, _ = version
    kind = labels.kinds[instruction][leaf]
    shape = instruction.shape.leaves[leaf]
    assert isinstance(kind, Term | Along)
    if kind == SUM and shape.element_type in NARROW:
        shape = ArrayShape("f32", shape.dimensions, (), shape.layout)
    return SharedValue(name=instruction.name, leaf=leaf, kind=kind, shape=shape)


def _divisor(micro: Demand, batch: Mapping[int, Along], module: Module, names: tuple[str, ...]) -> tuple[int, str]:
    leaves = argument_leaves(module)
    divisors = [(leaves[n].dimensions[along.dim], describe_argument(module, names, n)) for n, along in batch.items()]
    divisors += [(size, f"{i.opcode} {i.name}") for size, i in micro.divisors()]
    divisor = gcd(*(size for size, _ in divisors))
    return divisor, min(divisors, key=lambda entry: entry[0])[1]


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
    """Move linear operations on one sum to the once part, unless their result is below the sum."""
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
