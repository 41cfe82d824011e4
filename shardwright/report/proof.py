"""Compares a plan's collectives with XLA's in the partitioned program, one by one.

XLA names a collective after the planned instruction it was made for. The two sides are matched

1. equal ones of one instruction;
2. equal ones wherever they stand, if the instruction has none in the program: one that computes nothing (an annotation)
   may lose its name to the one before it;
3. the rest by instruction and kind: one instruction's need may be one line of the plan and two collectives (XLA reduces
   scalars over one axis after the other), or the reverse;
4. the rest by kind, devices and bytes: a value needed equally by several instructions is moved once, for the first of
   them that XLA met.

Matched collectives must run within the devices of the plan's groups: equal bytes over another axis are other links.
Sender and receiver of each pair of a permute must be in one group.

An all-reduce with only a slice kept on every device counts as a reduce-scatter, its form on GPU and TPU, unless the
plan has an all-reduce there: then it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from shardwright.cost import wire_bytes
from shardwright.cost.moves.device_groups import device_groups
from shardwright.hlo import parse
from shardwright.hlo.replica_groups import parse_replica_groups
from shardwright.plans.plan import Plan, PlannedCollective
from shardwright.plans.shardings import Mesh
from shardwright.tuning import PROOF_TOLERANCE, SMALL_PAYLOAD_BYTES

Status = Literal["agrees", "differs", "other devices", "not in the plan", "not in the program"]

#: The devices of each group of a collective, whatever their order; of a permute in XLA's program, of each pair.
_Groups = frozenset[frozenset[int]]


class Observed(Protocol):
    """A collective observed in a partitioned program; bytes of one execution."""

    @property
    def kind(self) -> str: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def groups(self) -> str:
        """In XLA's text; `all` if it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One collective of either side; bytes of one execution."""

    kind: str
    group_size: int
    payload_bytes: int
    wire_bytes: int
    count: int
    instruction: str
    groups: _Groups
    cause: str = ""
    axes: tuple[str, ...] = ()
    over: str = ""

    @property
    def amount(self) -> tuple[str, int, int, int]:
        """Key shared by collectives of equal traffic, regardless of devices."""
        return (self.kind, self.payload_bytes, self.wire_bytes, self.count)

    @property
    def signature(self) -> tuple[tuple[str, int, int, int], _Groups]:
        """Key shared by equal collectives."""
        return (self.amount, self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofLine:
    """Collectives of one instruction, kind and cause, on both sides; executions and bytes sent by one device, a step.

    where: the user's source line, `model.py:63`, if the program names it.
    group_size: devices of XLA's largest group, of the plan's if the program has none.
    axes: of the plan's lines; empty if the plan has none. over: the same in words (`PlannedCollective.over`).
    payload_bytes: of the largest collective, once.
    """

    status: Status
    kind: str
    group_size: int
    axes: tuple[str, ...]
    over: str
    instruction: str
    cause: str
    where: str
    payload_bytes: int
    predicted_count: int
    observed_count: int
    predicted_wire_bytes: int
    observed_wire_bytes: int

    @property
    def difference_bytes(self) -> int:
        return self.observed_wire_bytes - self.predicted_wire_bytes

    @property
    def is_small(self) -> bool:
        """Whether nothing of it is worth a line of the plan."""
        return self.payload_bytes * max(self.predicted_count, self.observed_count) <= SMALL_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenMemory:
    """Bytes of one device, the plan's and the compiler's. Outputs that are updates in place are left out."""

    predicted_arguments_bytes: int
    predicted_outputs_bytes: int
    predicted_temporaries_bytes: int
    compiled_arguments_bytes: int
    compiled_outputs_bytes: int
    compiled_temporaries_bytes: int

    @property
    def predicted_bytes(self) -> int:
        return self.predicted_arguments_bytes + self.predicted_outputs_bytes + self.predicted_temporaries_bytes

    @property
    def compiled_bytes(self) -> int:
        return self.compiled_arguments_bytes + self.compiled_outputs_bytes + self.compiled_temporaries_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Whether XLA's program has the collectives of a plan, and the missing ones. `lines` come in the plan's order.

    on: name of the devices whose compiler made the program; empty: XLA:CPU of this machine. memory: where the program
    was compiled to the end for such devices; it has no part in `holds`.
    """

    module_name: str
    mesh: Mesh
    tolerance: float
    lines: tuple[ProofLine, ...]
    on: str = ""
    memory: ProvenMemory | None = None

    @property
    def predicted_wire_bytes(self) -> int:
        """Bytes one device sends a step, by the plan."""
        return sum(line.predicted_wire_bytes for line in self.lines)

    @property
    def observed_wire_bytes(self) -> int:
        return sum(line.observed_wire_bytes for line in self.lines)

    @property
    def differences(self) -> tuple[ProofLine, ...]:
        """Lines in disagreement, the most bytes first."""
        disagreeing = [line for line in self.lines if line.status != "agrees"]
        return tuple(sorted(disagreeing, key=lambda line: (-abs(line.difference_bytes), line.instruction, line.kind)))

    @property
    def difference(self) -> float:
        """Bytes that differ, excess and lack counted equally, relative to the total; negligible lines left out."""
        larger = max(self.predicted_wire_bytes, self.observed_wire_bytes)
        return sum(abs(line.difference_bytes) for line in self.lines if not line.is_small) / max(larger, 1)

    @property
    def holds(self) -> bool:
        """No collective without a line of the plan or over other axes, and all differences within the tolerance."""
        if any(line.status in ("not in the plan", "other devices") for line in self.lines):
            return False
        return self.difference <= self.tolerance

    def explain(self, *, everything: bool = False, width: int = 110) -> str:
        """The comparison in text: totals by kind, axes and cause, then the differences, or every line."""
        from shardwright.report.collectives import explain_proof

        return explain_proof(self, everything=everything, width=width)


def prove(
    plan: Plan,
    observed: Iterable[Observed],
    *,
    tolerance: float = PROOF_TOLERANCE,
    on: str = "",
    memory: ProvenMemory | None = None,
) -> Proof:
    """Match the plan's collectives with those of its partitioned program.

    on, memory: see `Proof`. If the plan came without its HLO text, lines have no source.
    """
    planned, seen = items_of_plan(plan, on), items_of_program(plan, observed, on)
    where = _source_lines(plan, {item.instruction for item in (*planned, *seen)})
    lines = [
        _line(planned_side, program_side, where.get((planned_side or program_side)[0].instruction, ""), tolerance)
        for planned_side, program_side in _match_items(planned, seen)
    ]
    return Proof(
        module_name=plan.module_name, mesh=plan.mesh, tolerance=tolerance, lines=tuple(lines), on=on, memory=memory
    )


# ---- the two sides ---------------------------------------------------------------
def items_of_plan(plan: Plan, on: str = "") -> list[Item]:
    """The plan's collectives with traffic, as the compiler of the devices `on` sends them."""
    widths = {"": 1, "bf16": 1 if on.startswith("tpu") else 2}
    return [
        Item(
            kind=collective.kind,
            group_size=len(collective.groups[0]) if collective.groups else plan.mesh.size(collective.axes),
            payload_bytes=widths[collective.sent_as] * collective.payload_bytes,
            wire_bytes=widths[collective.sent_as] * collective.wire_bytes,
            count=collective.count,
            instruction=collective.instruction,
            cause=collective.cause,
            axes=collective.axes,
            over=collective.over,
            groups=_groups_of_plan(plan.mesh, collective),
        )
        for collective in plan.collectives
        if collective.wire_bytes
    ]


def items_of_program(plan: Plan, observed: Iterable[Observed], on: str = "") -> list[Item]:
    """The program's collectives over more than one device, reductions in the plan's form."""
    planned: dict[str, list[Item]] = {}
    for item in items_of_plan(plan, on):
        planned.setdefault(item.instruction, []).append(item)
    items = [_to_item(collective, plan.mesh.device_count) for collective in observed if collective.group_size > 1]
    return [_as_planned(item, planned.get(item.instruction, [])) for item in items]


def _groups_of_plan(mesh: Mesh, planned: PlannedCollective) -> _Groups:
    return _to_sets(planned.groups or device_groups(planned.axes, mesh))


def _groups_of_observed(observed: Observed, devices: int) -> _Groups:
    """Groups of more than one device: a permute from a device to itself sends nothing."""
    groups = [range(devices)] if observed.groups == "all" else parse_replica_groups(observed.groups)
    return frozenset(group for group in map(frozenset, groups) if len(group) > 1)


def _to_sets(groups: Iterable[Iterable[int]]) -> _Groups:
    return frozenset(map(frozenset, groups))


def _to_item(observed: Observed, devices: int) -> Item:
    name = getattr(observed, "op_name", "") or getattr(observed, "instruction", "")
    return Item(
        kind=observed.kind,
        group_size=observed.group_size,
        payload_bytes=observed.payload_bytes,
        wire_bytes=observed.wire_bytes,
        count=observed.count,
        instruction=name,
        groups=_groups_of_observed(observed, devices),
    )


def _as_planned(item: Item, planned: Sequence[Item]) -> Item:
    """A reduce-scatter in the form of the plan's all-reduce at its instruction, if it has one."""
    if item.kind != "reduce-scatter":
        return item
    whole, signatures = _as_all_reduce(item), {planned_item.signature for planned_item in planned}
    if item.signature in signatures or whole.signature in signatures:
        return item if item.signature in signatures else whole
    kinds = {planned_item.kind for planned_item in planned}
    return whole if "all-reduce" in kinds and "reduce-scatter" not in kinds else item


def _identity(item: Item) -> Item:
    return item


def _as_all_reduce(item: Item) -> Item:
    if item.kind != "reduce-scatter":
        return item
    return replace(item, kind="all-reduce", wire_bytes=wire_bytes("all-reduce", item.payload_bytes, item.group_size))


# ---- matching --------------------------------------------------------------------
_Pair = tuple[list[Item], list[Item]]


def _match_items(planned: Sequence[Item], observed: Sequence[Item]) -> Iterator[_Pair]:
    """Pairs of matching lists; one of them may be empty."""
    cells: dict[tuple[str, str], _Pair] = {}
    for side, items in enumerate((planned, observed)):
        for item in items:
            cells.setdefault((item.instruction, item.kind), ([], []))[side].append(item)
    rests: list[_Pair] = []
    for planned_side, program_side in cells.values():
        equal, missing, extra = _equal_pairs(planned_side, program_side)
        yield from equal
        rests.append((missing, extra))
    nowhere = [(missing, extra) for missing, extra in rests if not extra]
    yield from _match_elsewhere(nowhere, rests, _identity, _is_equal)
    for missing, extra in rests:
        if missing and extra:  # the instruction has them, of another size
            yield [*missing], [*extra]
            missing.clear()
            extra.clear()
    for convert in (_identity, _as_all_reduce):  # an all-reduce that is one is not taken for one that is sliced
        for fits in (_is_equal, _is_equal_within):
            yield from _match_elsewhere(rests, rests, convert, fits)
    for missing, extra in rests:
        yield from (([item], []) for item in missing)
        yield from (([], [item]) for item in extra)


def _match_elsewhere(
    lacking: Sequence[_Pair],
    rests: Sequence[_Pair],
    convert: Callable[[Item], Item],
    fits: Callable[[Item, Item], bool],
) -> Iterator[_Pair]:
    """Pairs of a plan's collective in `lacking` and one of the program in `rests` that fits it; both are taken out."""
    for missing, _ in lacking:
        for item in list(missing):
            match = next((match for _, extra in rests if (match := _take(extra, item, convert, fits))), None)
            if match is not None:
                missing.remove(item)
                yield [item], [match]


def _equal_pairs(planned: Sequence[Item], observed: Sequence[Item]) -> tuple[list[_Pair], list[Item], list[Item]]:
    """Equal collectives of both sides, grouped by the plan's cause and axes; and the rest of both sides."""
    missing, extra = [], list(observed)
    pairs: dict[tuple[str, tuple[str, ...], str], _Pair] = {}
    for wanted in planned:
        equal = _take(extra, wanted, _identity, _is_equal)
        if equal is None:
            missing.append(wanted)
            continue
        planned_side, program_side = pairs.setdefault((wanted.cause, wanted.axes, wanted.over), ([], []))
        planned_side.append(wanted)
        program_side.append(equal)
    return list(pairs.values()), missing, extra


def _take(
    observed: list[Item], planned: Item, transform: Callable[[Item], Item], fits: Callable[[Item, Item], bool]
) -> Item | None:
    """Take out the first collective that, after `transform`, fits the plan's."""
    for index, item in enumerate(observed):
        if fits(transform(item), planned):
            del observed[index]
            return transform(item)
    return None


def _is_equal(observed: Item, planned: Item) -> bool:
    """Whether both are the same; a plan knows the groups of a permute, but not its pairs."""
    return (
        _is_equal_within(observed, planned)
        if observed.kind == "collective-permute"
        else observed.signature == planned.signature
    )


def _is_equal_within(observed: Item, planned: Item) -> bool:
    """Whether equal traffic runs between fewer devices, all of them the plan's."""
    return observed.amount == planned.amount and _stays_within([observed], [planned])


def _line(left: Sequence[Item], right: Sequence[Item], where: str, tolerance: float) -> ProofLine:
    items = [*left, *right]
    line = ProofLine(
        status="agrees",
        kind=items[0].kind,
        group_size=max(item.group_size for item in right or left),
        axes=tuple(dict.fromkeys(axis for item in left for axis in item.axes)),
        over=", ".join(dict.fromkeys(item.over for item in left)),
        instruction=items[0].instruction,
        cause=items[0].cause,
        where=where,
        payload_bytes=max(item.payload_bytes for item in items),
        predicted_count=sum(item.count for item in left),
        observed_count=sum(item.count for item in right),
        predicted_wire_bytes=sum(item.wire_bytes * item.count for item in left),
        observed_wire_bytes=sum(item.wire_bytes * item.count for item in right),
    )
    return replace(line, status=_status(line, _stays_within(right, left), tolerance))


def _stays_within(right: Sequence[Item], left: Sequence[Item]) -> bool:
    """Whether XLA's groups lie in the plan's: a sum over two axes may run over one after the other."""
    planned = [group for item in left for group in item.groups]
    return all(any(seen <= group for group in planned) for item in right for seen in item.groups)


def _status(line: ProofLine, stays_within: bool, tolerance: float) -> Status:
    larger = max(line.predicted_wire_bytes, line.observed_wire_bytes)
    if line.is_small:
        return "agrees"
    if abs(line.difference_bytes) <= tolerance * larger:
        return "agrees" if stays_within else "other devices"
    if not line.predicted_count:
        return "not in the plan"
    return "differs" if line.observed_count else "not in the program"


def _source_lines(plan: Plan, names: set[str]) -> dict[str, str]:
    """`file:line` of the named instructions."""
    if plan.hlo_text is None:
        return {}
    module = parse(plan.hlo_text)
    source_lines = {}
    for computation in module.computations:
        for instruction in computation:
            if instruction.name in names and (place := module.place(instruction)):
                source_lines[instruction.name] = place
    return source_lines
