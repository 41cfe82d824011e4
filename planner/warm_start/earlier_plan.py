"""An earlier search's three-axis plan, saved as a starting point of nearly equal programs.

With another batch or other devices a plan's decisions mostly persist: the role of each mesh axis per instruction, by
the factors of its rule. Roles are independent of sizes, and a search starting there needs no two-axis plan to descend
from. A resized axis (e.g. after losing a node) has no role on values it cannot split. When part of the plan is
untranslatable even so, it is not used. Decisions are identified by node numbers, like those of `saved_messages`.
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
from shardwright.plans.shardings import Mesh, TensorSharding, has_rotated_axes

#: Labels of an axis without a role, and of transposed arrays (`axis_order`).
_NO_ROLE, _TRANSPOSED = "", "turned"

#: Roles of the axes, in order, in an instruction with a rule, plus `_TRANSPOSED` at the end when transposed; or a
#: value's sharding.
AxisRoles = tuple[str, ...] | TensorSharding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EarlierPlan:
    """Decisions of a plan.

    mesh: its mesh.
    roles: distinct axis roles, or shardings of values.
    decisions: [decisions, 3]: node number, leaf (-1: the node itself), index into `roles`.
    """

    mesh: Mesh
    roles: tuple[AxisRoles, ...]
    decisions: IntArray

    @classmethod
    def of(cls, graph: CostGraph, states: Mapping[Variable, int]) -> EarlierPlan:
        """From the states of all variables of a program on one mesh."""
        numbers, ways, role_numbers = number_nodes(graph.flow), dict[AxisRoles, int](), dict[int, int]()
        rows = []
        for variable, state in states.items():
            strategy = graph.set_of(variable).strategies[state]
            if id(strategy) not in role_numbers:
                role_numbers[id(strategy)] = ways.setdefault(_roles_of(strategy, graph.prices.mesh), len(ways))
            if variable[0] in numbers:
                rows.append((numbers[variable[0]], variable[1], role_numbers[id(strategy)]))
        return cls(mesh=graph.prices.mesh, roles=tuple(ways), decisions=np.array(rows, np.int64).reshape(-1, 3))

    def translate_to(self, graph: CostGraph, variables: Sequence[Variable]) -> Mapping[Variable, Strategy] | None:
        """The strategies of a nearly equal program's variables on a mesh with the same axes; resized axes lose roles
        impossible there. None when some variable has no strategy."""
        numbers = number_nodes(graph.flow)
        resized = self.axes_of_other_size(graph.prices.mesh)
        roles_by_decision = {(node, leaf): way for node, leaf, way in self.decisions.tolist()}
        strategy_cache: dict[object, Strategy | None] = {}
        strategies: dict[Variable, Strategy] = {}
        for node, leaf in variables:
            way = roles_by_decision.get((numbers.get(node, -1), leaf))
            if way is None:
                return None
            key = (way, graph.variables.signatures[node], leaf, graph.variables.partial_operand_sets[node])
            if key not in strategy_cache:
                known_way, at = self.roles[way], (node, leaf)
                strategy_cache[key] = _find_strategy(known_way, graph, at) or _find_strategy(
                    self._without_axes(known_way, resized), graph, at
                )
            strategy = strategy_cache[key]
            if strategy is None:
                return None
            strategies[node, leaf] = strategy
        return strategies

    def axes_of_other_size(self, mesh: Mesh) -> frozenset[str]:
        """Axes with a different size on a mesh of the same axes."""
        return frozenset(axis.name for axis in self.mesh.axes if mesh.sizes[axis.name] != axis.size)

    def _without_axes(self, way: AxisRoles, axes: frozenset[str]) -> AxisRoles:
        """The same roles without some axes."""
        if not isinstance(way, TensorSharding):
            count = len(self.mesh.axes)
            pairs = zip(self.mesh.axes, way[:count], strict=True)
            return (*(_NO_ROLE if axis.name in axes else does for axis, does in pairs), *way[count:])
        dims = tuple(tuple(axis for axis in dim if axis not in axes) for dim in way.dims)
        return TensorSharding(dims, tuple(axis for axis in way.unreduced if axis not in axes))

    def encode(self) -> bytes:
        """Serialized bytes, the input of `decode`."""
        ways = [[way.dims, way.unreduced] if isinstance(way, TensorSharding) else way for way in self.roles]
        said = {"mesh": list(self.mesh.sizes.items()), "ways": ways}
        return json.dumps(said).encode() + b"\n" + self.decisions.astype("<i4").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> EarlierPlan:
        """Raises ValueError, TypeError, KeyError or IndexError on data not written by `encode`."""
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
    turns = any(has_rotated_axes(sharding, mesh) for sharding in (*strategy.operands, *strategy.results))
    return (*map(_role_name, strategy.choices), *((_TRANSPOSED,) if turns else ()))


def _role_name(choice: AxisChoice) -> str:
    """Factors have names of their own within a rule."""
    if choice.factor is not None:
        return choice.factor.name
    return _NO_ROLE if choice.linear is None else "+" + ",".join(map(str, sorted(choice.linear)))


def _roles_from_json(way: Sequence[Any]) -> AxisRoles:
    """Roles from their JSON form."""
    if all(isinstance(role, str) for role in way):
        return tuple(way)
    dims, unreduced = way
    return TensorSharding(tuple(map(tuple, dims)), tuple(unreduced))


def _find_strategy(way: AxisRoles, graph: CostGraph, variable: Variable) -> Strategy | None:
    """The strategy of a node, or the sharding of a shared layout, with these roles; None without one."""
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
        strategies = [*strategies_of(node.instruction, mesh, along, may_split)] if len(along) == len(mesh.axes) else []
        return (
            (strategies[-1] if len(way) > len(names) else strategies[0]) if strategies else None
        )  # the transposed one comes last
    shape, fits = node.shapes[max(leaf, 0)], divides if way.unreduced else may_split
    if len(way.dims) != shape.rank:
        return None
    pairs = zip(shape.dimensions, way.dims, strict=True)
    is_legal = all(fits(size, [mesh.sizes[axis] for axis in axes]) for size, axes in pairs)
    return Strategy(operands=(way,), results=(way,)) if is_legal else None
