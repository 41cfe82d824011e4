"""Replaces attention that a program writes out by calls of the operator.

The scores' product, what follows up to the products with v and with gradients, and those products become one call
forward and one backward; no array of rows x keys stays but a bias that has numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from shardwright.attention import AttentionCall, read_call
from shardwright.hlo import ArrayShape, Computation, Instruction, Module
from shardwright.planner.attention.carried import drop_unread_carried
from shardwright.planner.attention.divide import divide_first
from shardwright.planner.attention.elementwise import ELEMENTWISE
from shardwright.planner.attention.flow import Flow, Readers
from shardwright.planner.attention.kernel_limits import KernelLimits
from shardwright.planner.attention.masks import Masks
from shardwright.planner.attention.rebuild import Rewritten, rebuild
from shardwright.planner.attention.recognise import Attention, LeftAloneError, recognise
from shardwright.planner.attention.stacked import compute_again, keep_results
from shardwright.planner.attention.whole import WholeValues
from shardwright.planner.attention.write import AttentionWriter, call_of
from shardwright.planner.rewrites import edit
from shardwright.plans.attention_note import AttentionNote, gather_notes

_VIEWS = frozenset({"reshape", "transpose", "broadcast", "reduce"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A call in the place of an attention.

    name: of the call's instruction. product: of the scores' product. note: what the plan says of it.
    """

    name: str
    product: str
    call: AttentionCall
    note: AttentionNote


@dataclass(frozen=True, slots=True)
class Fused:
    """A module with calls in the place of attention; left_alone: notes of attention that stays, with the reason."""

    module: Module
    replaced: tuple[Replaced, ...] = ()
    left_alone: tuple[AttentionNote, ...] = ()

    @property
    def notes(self) -> tuple[AttentionNote, ...]:
        """All notes, equal ones as one."""
        return gather_notes((*(each.note for each in self.replaced), *self.left_alone))


@dataclass(frozen=True, slots=True)
class _Match:
    attention: Attention
    call: AttentionCall
    computation: Computation


#: The source line of an attention, and its forward call.
_Form = tuple[str, AttentionCall]


def note_calls(module: Module) -> tuple[AttentionNote, ...]:
    """Notes of the calls that a program has of itself."""
    calls = [(instruction, call) for instruction in module.instructions() if (call := read_call(instruction))]
    return gather_notes(
        AttentionNote(
            place=module.place(instruction),
            count=1,
            kind="backward" if call.backward else "forward",
            words=_words(call, call.mask),
            replaced=False,
        )
        for instruction, call in calls
    )


def note_recomputed(
    notes: Sequence[AttentionNote], module: Module, again: Collection[str]
) -> tuple[AttentionNote, ...]:
    """`notes`, with those of forward calls that `module` computes again. again: names of instructions."""
    forward = {note.place: note for note in notes if note.kind == "forward" and not note.reason}
    calls = [each for each in module.instructions() if each.name in again and read_call(each)] if forward else []
    recomputed = (forward[place] for each in calls if (place := module.place(each)) in forward)
    return gather_notes((*notes, *(replace(note, kind="again", count=1, saved_bytes=0) for note in recomputed)))


def fuse_attention(module: Module, limits: KernelLimits) -> Fused:
    """`module` with what `limits` take of its attention replaced; the module itself without any."""
    if not _may_have_attention(module):
        return Fused(module)
    find_products = partial(_find_products, flow=Flow(module))
    return _fuse_rewritten(
        module,
        partial(compute_again, module, find_products),
        fuse=partial(_fuse_divided, limits=limits),
        finish=_keep_results,
    )


def _fuse_rewritten(
    module: Module,
    rewrite: Callable[[Collection[str]], Rewritten | None],
    fuse: Callable[[Module], Fused],
    finish: Callable[[Fused, Mapping[str, str]], Fused] = lambda fused, _: fused,
) -> Fused:
    """`fuse` of the rewritten module, of what is rewritten in vain of the module as it is.

    rewrite: given names of what stays. finish: what is done to the rewritten module in the end, given its origins.
    """
    apart: set[str] = set()
    left_alone: tuple[AttentionNote, ...] = ()
    while (rewritten := rewrite(apart)) is not None:
        fused = fuse(rewritten.module)
        left_alone = left_alone or fused.left_alone  # of the first: why what is rewritten first stays nonetheless
        names = {each.name for each in fused.module.instructions()}
        in_vain = {origin for name, origin in rewritten.origins.items() if name in names}
        if not in_vain:
            return replace(finish(fused, rewritten.origins), left_alone=left_alone)
        apart |= in_vain
    fused = fuse(module)
    return replace(fused, left_alone=left_alone or fused.left_alone)


def _keep_results(fused: Fused, products: Mapping[str, str]) -> Fused:
    """Forward calls of backward loops, whose scores' products are copies, give way to what forward loops computed."""
    forward = {each.product: each for each in fused.replaced if each.note.kind != "backward"}
    calls = {
        forward[copy].name: forward[product].name
        for copy, product in products.items()
        if copy in forward and product in forward
    }
    module, repeated = keep_results(fused.module, calls)
    replaced = (
        replace(each, note=replace(each.note, kind="again", saved_bytes=0)) if each.name in calls else each
        for each in fused.replaced
        if each.name not in repeated
    )
    return replace(fused, module=module, replaced=tuple(replaced))


def _fuse_divided(module: Module, limits: KernelLimits) -> Fused:
    """The same, probabilities divided ahead of the products with v where they are divided behind them."""
    return _fuse_rewritten(module, partial(divide_first, module), fuse=partial(_fuse, limits=limits))


def _fuse(module: Module, limits: KernelLimits) -> Fused:
    flow = Flow(module)
    whole = WholeValues(flow)
    masks = Masks(flow, whole)
    matches: list[_Match] = []
    left_alone: list[AttentionNote] = []
    for computation in module.computations:
        readers = Readers(computation, flow)
        ends: set[Instruction] = set()
        for product in _find_products(computation, flow):
            try:
                attention = recognise(product, readers, whole, masks)
                if attention is None or not ends.isdisjoint(result.instead_of for result in attention.results):
                    continue
                matches.append(_Match(attention, _require_kernel(attention, limits), computation))
                ends.update(result.instead_of for result in attention.results)
            except LeftAloneError as reason:
                left_alone.append(_note_left_alone(module, product, reason))
    if not matches:
        return Fused(module, (), tuple(left_alone))
    return _replace(module, matches, flow, left_alone)


def _note_left_alone(module: Module, product: Instruction, reason: LeftAloneError) -> AttentionNote:
    words = "attention as the program writes it"
    place = module.place(product) or product.name
    return AttentionNote(place=place, count=1, kind="forward", words=words, replaced=False, reason=str(reason))


def _words(call: AttentionCall, mask: str) -> str:
    heads = f"{call.heads} heads" if call.heads == call.kv_heads else f"{call.heads} heads on {call.kv_heads}"
    return f"{mask}, {heads} of {call.width}, {call.rows} × {call.keys}, {call.element_type}"


def _may_have_attention(module: Module) -> bool:
    opcodes = Counter(instruction.opcode for instruction in module.instructions())
    return opcodes["exponential"] > 0 and opcodes["dot"] > 1


def _find_products(computation: Computation, flow: Flow) -> list[Instruction]:
    """Products that exponentials of as many elements are computed from, outside of manual regions."""
    products: dict[Instruction, None] = {}
    for exponential in computation:
        if exponential.opcode != "exponential" or exponential.shape.leaves[0].rank < 2:
            continue
        if exponential in flow.in_regions:
            continue
        count = prod(exponential.shape.leaves[0].dimensions)
        if not count:
            continue
        pending, visited = [exponential], {exponential}
        while pending:
            value = pending.pop()
            if value.opcode == "dot":
                if prod(value.shape.leaves[0].dimensions) == count:
                    products.setdefault(value)
            elif value.opcode in ELEMENTWISE or value.opcode in _VIEWS:
                for operand in value.operands:
                    source = flow.source(operand)
                    large = isinstance(source.shape, ArrayShape) and prod(source.shape.dimensions) == count
                    if large and source not in visited:
                        visited.add(source)
                        pending.append(source)
    return list(products)


def _require_kernel(attention: Attention, limits: KernelLimits) -> AttentionCall:
    """The forward call. Raises LeftAloneError."""
    if not any(result.role in ("out", "dv", "dq", "dk") for result in attention.results):
        raise LeftAloneError("nothing reads it")
    call = call_of(attention)
    problem = limits.problem(call)
    if problem is not None:
        raise LeftAloneError(problem)
    if any(result.role == "dbias" for result in attention.results) and call.bias[:2] != (1, call.heads):
        raise LeftAloneError("its bias has a gradient that the kernel does not make")
    return call


def _replace(module: Module, matches: list[_Match], flow: Flow, left_alone: list[AttentionNote]) -> Fused:
    names = edit.Names(module)
    replaced: dict[Instruction, Instruction] = {}
    regions: dict[str, Computation] = {}
    written: dict[Computation, list[tuple[Instruction, list[Instruction]]]] = {}
    entries: list[Replaced] = []
    again = _count_again(module, matches)
    for match in matches:
        writer = AttentionWriter(match.attention, match.call, names, flow, regions)
        try:
            writer.write()
        except LeftAloneError as reason:
            left_alone.append(_note_left_alone(module, match.attention.cone.product, reason))
            continue
        replaced.update(writer.replaced)
        written.setdefault(match.computation, []).append((match.attention.cone.product, writer.written))
        entries += _entries(module, match, writer, again)
    fused = drop_unread_carried(rebuild(module, replaced, written, regions.values()))
    return Fused(fused, tuple(entries), tuple(left_alone))


def _entries(module: Module, match: _Match, writer: AttentionWriter, again: Counter[_Form]) -> list[Replaced]:
    attention = match.attention
    product = attention.cone.product
    key = _form(module, match)
    kinds = ["forward", "backward"][: len(writer.calls)]
    if len(kinds) == 2 and again[key] > 0:
        again[key] -= 1
        kinds[0] = "again"
    gone = sum(
        value.shape.size_bytes
        for value in attention.cone.labels
        if prod(value.shape.leaves[0].dimensions) == prod(product.shape.leaves[0].dimensions)
    )
    return [
        Replaced(
            name=instruction.name,
            product=product.name,
            call=match.call,
            note=AttentionNote(
                place=module.place(product),
                count=1,
                kind=kind,
                words=_words(match.call, attention.mask.words),
                saved_bytes=gone if kind != "backward" else 0,
            ),
        )
        for kind, instruction in zip(kinds, writer.calls, strict=True)
    ]


def _form(module: Module, match: _Match) -> _Form:
    return module.place(match.attention.cone.product), replace(match.call, statistics=False)


def _count_again(module: Module, matches: list[_Match]) -> Counter[_Form]:
    """How many forward passes with a backward pass have one without, which they compute again."""
    alone = Counter(_form(module, match) for match in matches if not match.call.statistics)
    both = Counter(_form(module, match) for match in matches if match.call.statistics)
    return alone & both
