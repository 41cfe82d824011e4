"""The integer program of stages, in PuLP, solved by HiGHS. No order of the nodes is assumed.

Variables
    x[n,c] ∈ {0,1}   node n is in chunk c; chunk c runs on stage c mod S
    r[v,s] ≥ 0       value (or shared variable) v is sent to stage s
    h[v,c] ≥ 0       chunk c keeps value v from the forward pass to the backward pass
    w[s] ≥ 0         workspace of stage s
    t ≥ 0            seconds of the slowest chunk

Objective
    minimise t, or Σ_v Σ_s bytes[v] · r[v,s] with t fixed to a limit

Constraints, with y[n,s] = Σ_(c mod S = s) x[n,c]
    (1) Σ_c x[n,c] = 1                              every node                                    `_add_placement`
    (2) Σ_n x[n,c] ≥ 1                              every chunk: none is empty                    `_add_placement`
    (3) Σ_(d≤c) x[b,d] ≤ Σ_(d≤c) x[a,d]             every c, every pair: a must not come after b  `_add_order`
    (4) Σ_n seconds[n,c] · x[n,c] ≤ t               every chunk                                   `_add_balance`
    (5) r[v,s] ≥ y[reader,s] - y[maker,s]           every reader of v and every stage             `_add_transfers`
    (6) h[v,c] ≥ x[n,c]                             every node n saving v                         `_add_saved_values`
    (7) w[s] ≥ workspace[n] · y[n,s]                every node and stage                          `_add_memory`
    (8) Σ_n stored[n,s] · y[n,s] + Σ_v copy[v] · r[v,s] + w[s]
        + Σ_c k[c] · (Σ_n saved[n] · x[n,c] + Σ_v shard[v] · h[v,c]) ≤ memory[s]
                                                    every stage and moment k of its schedule      `_add_memory`

Seconds are scaled to an average chunk, bytes to the largest coefficient of their row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import pulp

from shardwright.planner.solver.highs import highs
from shardwright.planner.stages.stage_graph import CutProblem, StageCut, of_kind, state_transfer_bytes
from shardwright.planner.stages.tuning import CROSSING_SCALE

_Terms = list[tuple[pulp.LpVariable, float]]


def fastest(problem: CutProblem, *, most_cpu_s: float) -> StageCut | None:
    """The cut with the fastest slowest chunk; None: infeasible, or no solution in time."""
    program = _Program(problem)
    program.lp.setObjective(pulp.LpAffineExpression([(program.slowest, 1.0)]))
    chunk_of = program.solve(most_cpu_s)
    return None if chunk_of is None else problem.to_cut(chunk_of, is_optimal=program.is_optimal)


def min_crossing(problem: CutProblem, most_s: float, *, most_cpu_s: float) -> StageCut | None:
    """The cut with the least bytes sent among those with chunks of at most `most_s` seconds; None: there is none."""
    program = _Program(problem, sending=True)
    program.slowest.upBound = most_s / program.unit_s * (1 + 1e-9)
    program.lp.setObjective(pulp.LpAffineExpression(program.crossing()))
    chunk_of = program.solve(most_cpu_s)
    if chunk_of is None:
        return None
    cut = problem.to_cut(chunk_of, is_optimal=program.is_optimal)
    return cut if problem.fits(cut) and max(cut.chunk_s) <= most_s * (1 + 1e-6) else None


@dataclass(slots=True, eq=False)
class _Program:
    problem: CutProblem
    sending: bool = False
    lp: pulp.LpProblem = field(init=False)
    x: list[list[pulp.LpVariable]] = field(init=False)
    slowest: pulp.LpVariable = field(init=False)
    unit_s: float = field(init=False)
    is_optimal: bool = False
    _sends: dict[tuple[str, int, int], pulp.LpVariable] = field(default_factory=dict)
    _keeps: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        self.unit_s = problem.average_s or 1.0
        self.lp = pulp.LpProblem("stages", pulp.LpMinimize)
        self.x = [
            [self.lp.add_variable(f"x_{n}_{c}", cat=pulp.LpBinary) for c in range(problem.chunk_count)]
            for n in range(len(problem.graph.nodes))
        ]
        self.slowest = self.lp.add_variable("t", lowBound=0)
        self._add_placement()
        self._add_order()
        self._add_balance()
        limited = [stage for stage, place in enumerate(problem.stage_slots) if isfinite(place.memory_bytes)]
        if self.sending or (limited and problem.graph.shared):
            self._add_transfers()
        if limited:
            self._add_saved_values()
            for stage in limited:
                self._add_memory(stage)

    # ---- constraints of the module's docstring -------------------------------
    def _add(self, terms: _Terms, sense: int, limit: float) -> None:
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense=sense, rhs=limit))

    def _on(self, node: int, stage: int) -> list[pulp.LpVariable]:
        """The variables with sum y[n,s]."""
        return self.x[node][stage :: len(self.problem.stage_slots)]

    def _add_placement(self) -> None:
        for row in self.x:
            self._add([(variable, 1) for variable in row], pulp.LpConstraintEQ, 1)
        for chunk in range(self.problem.chunk_count):
            self._add([(row[chunk], 1) for row in self.x], pulp.LpConstraintGE, 1)

    def _add_order(self) -> None:
        pairs = {
            (v.producer, reader) if v.direction == "forward" else (reader, v.producer)
            for v in self.problem.graph.values
            for reader in v.readers
        }
        for before, after in sorted(pairs):
            for chunk in range(self.problem.chunk_count - 1):
                later = [(variable, 1.0) for variable in self.x[after][: chunk + 1]]
                earlier = [(variable, -1.0) for variable in self.x[before][: chunk + 1]]
                self._add(later + earlier, pulp.LpConstraintLE, 0)

    def _add_balance(self) -> None:
        problem = self.problem
        for chunk in range(problem.chunk_count):
            seconds = [
                (row[chunk], problem.node_cost(n, chunk).seconds(problem.micro_batches) / self.unit_s)
                for n, row in enumerate(self.x)
            ]
            self._add([*seconds, (self.slowest, -1)], pulp.LpConstraintLE, 0)

    def _add_transfers(self) -> None:
        graph = self.problem.graph
        for i, value in enumerate(graph.values):
            self._send("value", i, value.producer, (*value.readers, *value.saved_by))
        for i, shared in enumerate(graph.shared):
            self._send("shared", i, shared.owner, shared.readers)

    def _send(self, what: str, number: int, maker: int, readers: Sequence[int]) -> None:
        for stage in range(len(self.problem.stage_slots)):
            sent = self.lp.add_variable(f"r_{what}_{number}_{stage}", lowBound=0)
            self._sends[what, number, stage] = sent
            for reader in sorted(set(readers) - {maker}):
                there = [(variable, -1) for variable in self._on(reader, stage)]
                here = [(variable, 1) for variable in self._on(maker, stage)]
                self._add([(sent, 1), *there, *here], pulp.LpConstraintGE, 0)

    def _add_saved_values(self) -> None:
        for i, value in enumerate(self.problem.graph.values):
            if value.saved_by and any(value.shard_bytes):
                for chunk in range(self.problem.chunk_count):
                    saved = self._keeps[i, chunk] = self.lp.add_variable(f"h_{i}_{chunk}", lowBound=0)
                    for node in sorted(set(value.saved_by)):
                        self._add([(saved, 1), (self.x[node][chunk], -1)], pulp.LpConstraintGE, 0)

    def _add_memory(self, stage: int) -> None:
        problem, place, graph = self.problem, self.problem.stage_slots[stage], self.problem.graph
        workspace = self.lp.add_variable(f"w_{stage}", lowBound=0)
        unit = place.memory_bytes or 1.0
        always: _Terms = [(workspace, 1.0)]
        for n in range(len(graph.nodes)):
            work = problem.node_cost(n, stage)
            on = self._on(n, stage)
            if work.workspace_bytes:
                used = [(variable, -work.workspace_bytes / unit) for variable in on]
                self._add([(workspace, 1), *used], pulp.LpConstraintGE, 0)
            if stored := problem.resident_bytes(n, stage):
                always += [(variable, stored / unit) for variable in on]
        for i, shared in enumerate(graph.shared):
            if size := of_kind(shared.shard_bytes, place.kind):
                always.append((self._sends["shared", i, stage], size / unit))
        for moment in place.in_flight:
            self._add(
                _merge_terms(always + self._sum_saved_bytes(stage, moment, unit)),
                pulp.LpConstraintLE,
                place.memory_bytes / unit,
            )

    def _sum_saved_bytes(self, stage: int, moment: Sequence[int], unit: float) -> _Terms:
        """Bytes kept by the stage's chunks at one moment of its schedule."""
        problem, stages = self.problem, len(self.problem.stage_slots)
        terms: _Terms = []
        for i, count in enumerate(moment):
            chunk = stage + i * stages
            for n, row in enumerate(self.x):
                terms.append((row[chunk], count * problem.node_cost(n, chunk).saved_bytes / unit))
            for v, value in enumerate(problem.graph.values):
                if (v, chunk) in self._keeps:
                    size = of_kind(value.shard_bytes, problem.stage_slots[stage].kind)
                    terms.append((self._keeps[v, chunk], count * size / unit))
        return [(variable, amount) for variable, amount in terms if amount]

    # ---- solving ---------------------------------------------------------------
    def crossing(self) -> _Terms:
        """The bytes crossing stages, scaled."""
        graph, micro_batches = self.problem.graph, self.problem.micro_batches
        amounts = {("value", i): value.bytes for i, value in enumerate(graph.values)}
        amounts |= {("shared", i): state_transfer_bytes(shared, micro_batches) for i, shared in enumerate(graph.shared)}
        most = max(amounts.values(), default=0.0) or 1.0
        return [(sent, CROSSING_SCALE * amounts[key[:2]] / most) for key, sent in self._sends.items()]

    def solve(self, most_cpu_s: float) -> tuple[int, ...] | None:
        """The chunk of every node; None: no solution."""
        status = self.lp.solve(highs(gap=1e-9, most_cpu_s=most_cpu_s))
        values = [[variable.value() for variable in row] for row in self.x]
        if status == pulp.LpStatusInfeasible or any(value is None for row in values for value in row):
            return None
        if any(max(row) < 0.5 for row in values):
            return None
        self.is_optimal = self.lp.sol_status == pulp.LpSolutionOptimal
        return tuple(row.index(max(row)) for row in values)


def _merge_terms(terms: _Terms) -> _Terms:
    """Sums the coefficients of each variable."""
    merged: dict[str, tuple[pulp.LpVariable, float]] = {}
    for variable, amount in terms:
        merged[variable.name] = (variable, amount + merged.get(variable.name, (variable, 0.0))[1])
    return list(merged.values())
