"""The plan of an earlier search on three axes, kept for searches of nearly the same program to begin at.

What a plan decides is mostly the same with another batch or on other devices: what each axis of the mesh does for each
instruction, by the factors of its rule. Said so it means the same in all sizes, and a search that begins there needs no
plan on two axes to descend from. An axis of another size than before, because a node is lost, does nothing for what it
cannot split. Where some of the plan cannot be had otherwise, nothing is begun there. Decisions are told by the numbers
of the program's nodes, as those of `messages` are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.pbqp import IntArray
from shardwright.planner.strategies.expansion import AxisChoice, Strategy, choices_of, strategies_of
from shardwright.planner.strategies.padding import divides
from shardwright.planner.warm_start.saved_messages import number_nodes
from shardwright.shardings import Mesh, TensorSharding, has_rotated_axes

#: How it is said that an axis does nothing, and that arrays are turned (`axis_order`).
_NO_ROLE, _TRANSPOSED = "", "turned"

#: What the axes do, in their order, for an instruction that is computed by a rule, and `_TRANSPOSED` at the end where
#: it is; or how a value lies.
AxisRoles = tuple[str, ...] | TensorSharding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EarlierPlan:
    """What a plan decides.

    decisions: [decisions, 3]: number of the node, leaf (-1 for the node itself), and which of `ways` it takes.
    """

    mesh: Mesh
    roles: tuple[AxisRoles, ...]
    decisions: IntArray

    @classmethod
    def of(cls, graph: CostGraph, states: Mapping[Variable, int]) -> EarlierPlan:
        """Of the states of all variables of a program on one mesh."""
        numbers, ways, known = number_nodes(graph.flow), dict[AxisRoles, int](), dict[int, int]()
        rows = []
        for variable, state in states.items():
            strategy = graph.set_of(variable).strategies[state]
            if id(strategy) not in known:
                known[id(strategy)] = ways.setdefault(_roles_of(strategy, graph.prices.mesh), len(ways))
            if variable[0] in numbers:
                rows.append((numbers[variable[0]], variable[1], known[id(strategy)]))
        return cls(mesh=graph.prices.mesh, roles=tuple(ways), decisions=np.array(rows, np.int64).reshape(-1, 3))

    def translate_to(self, graph: CostGraph, variables: Sequence[Variable]) -> Mapping[Variable, Strategy] | None:
        """The same for the variables of nearly the same program on a mesh of the same axes; axes of another size do
        nothing for what else could not be had there. None where some of it cannot be had at all."""
        numbers = number_nodes(graph.flow)
        resized = self.axes_of_other_size(graph.prices.mesh)
        known = {(node, leaf): way for node, leaf, way in self.decisions.tolist()}
        made: dict[object, Strategy | None] = {}
        found: dict[Variable, Strategy] = {}
        for node, leaf in variables:
            way = known.get((numbers.get(node, -1), leaf))
            if way is None:
                return None
            key = (way, graph.variables.signatures[node], leaf, graph.variables.partial_operand_sets[node])
            if key not in made:
                known_way, at = self.roles[way], (node, leaf)
                made[key] = _find_strategy(known_way, graph, at) or _find_strategy(
                    self._without_axes(known_way, resized), graph, at
                )
            strategy = made[key]
            if strategy is None:
                return None
            found[node, leaf] = strategy
        return found

    def axes_of_other_size(self, mesh: Mesh) -> frozenset[str]:
        """The axes that have another size on a mesh of the same axes."""
        return frozenset(axis.name for axis in self.mesh.axes if mesh.sizes[axis.name] != axis.size)

    def _without_axes(self, way: AxisRoles, axes: frozenset[str]) -> AxisRoles:
        """The same with nothing that some axes do."""
        if not isinstance(way, TensorSharding):
            count = len(self.mesh.axes)
            pairs = zip(self.mesh.axes, way[:count], strict=True)
            return (*(_NO_ROLE if axis.name in axes else does for axis, does in pairs), *way[count:])
        dims = tuple(tuple(axis for axis in dim if axis not in axes) for dim in way.dims)
        return TensorSharding(dims, tuple(axis for axis in way.unreduced if axis not in axes))

    def encode(self) -> bytes:
        """As bytes, which `decode` reads."""
        ways = [[way.dims, way.unreduced] if isinstance(way, TensorSharding) else way for way in self.roles]
        said = {"mesh": list(self.mesh.sizes.items()), "ways": ways}
        return json.dumps(said).encode() + b"\n" + self.decisions.astype("<i4").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> EarlierPlan:
        """Raises ValueError, TypeError, KeyError or IndexError where `data` is nothing that `encode` wrote."""
        header, body = data.split(b"\n", 1)
        said = json.loads(header)
        decisions = np.frombuffer(body, "<i4").astype(np.int64).reshape(-1, 3)
        ways = tuple(_roles_from_json(way) for way in said["ways"])
        if len(decisions) and not (decisions[:, 2].min() >= 0 and decisions[:, 2].max() < len(ways)):
            raise ValueError("no plan decides so")
        return cls(mesh=Mesh.of(dict(said["mesh"])), roles=ways, decisions=decisions)


def _roles_of(strategy: Strategy, mesh: Mesh) -> AxisRoles:
    if not strategy.choices:
        return strategy.results[0]
    turns = any(has_rotated_axes(lies, mesh) for lies in (*strategy.operands, *strategy.results))
    return (*map(_role_name, strategy.choices), *((_TRANSPOSED,) if turns else ()))


def _role_name(choice: AxisChoice) -> str:
    """Factors have names of their own within a rule."""
    if choice.factor is not None:
        return choice.factor.name
    return _NO_ROLE if choice.linear is None else "+" + ",".join(map(str, sorted(choice.linear)))


def _roles_from_json(way: Sequence[Any]) -> AxisRoles:
    """A way as JSON has it."""
    if all(isinstance(each, str) for each in way):
        return tuple(way)
    dims, unreduced = way
    return TensorSharding(tuple(map(tuple, dims)), tuple(unreduced))


def _find_strategy(way: AxisRoles, graph: CostGraph, variable: Variable) -> Strategy | None:
    """The strategy of a node, or how its hub lies, that a way is; None where there is none."""
    index, leaf = variable
    node, mesh, may_split = graph.flow.nodes[index], graph.prices.mesh, graph.builder.may_split(is_near=True)
    if not isinstance(way, TensorSharding):
        if leaf >= 0 or node.is_value:
            return None
        rule = graph.builder.rules.of_number(graph.variables.signatures[index])
        choices = {
            _role_name(choice): choice for choice in choices_of(rule, graph.variables.partial_operand_sets[index])
        }
        names = way[: len(mesh.axes)]
        along = [[choices[name]] for name in names if name in choices]
        found = [*strategies_of(node.instruction, mesh, along, may_split)] if len(along) == len(mesh.axes) else []
        return (found[-1] if len(way) > len(names) else found[0]) if found else None  # the turned one comes last
    shape, fits = node.shapes[max(leaf, 0)], divides if way.unreduced else may_split
    if len(way.dims) != shape.rank:
        return None
    pairs = zip(shape.dimensions, way.dims, strict=True)
    is_legal = all(fits(size, [mesh.sizes[axis] for axis in axes]) for size, axes in pairs)
    return Strategy(operands=(way,), results=(way,)) if is_legal else None
