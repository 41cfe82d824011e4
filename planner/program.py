"""What is planned, read once: the rewritten module, who reads what, names, pins, and what may be partial.

Nothing here depends on a mesh.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from shardwright.config import PlanOptions
from shardwright.cost import HardwareProfile
from shardwright.cost.liveness import Liveness, liveness
from shardwright.hlo import Module, parse
from shardwright.options import name_matches
from shardwright.planner.annotations import collect
from shardwright.planner.budget import Memory
from shardwright.planner.dataflow import Leaf, build_dataflow
from shardwright.planner.force import state_arguments
from shardwright.planner.graph import Layout, free_nodes, lay_out, variables_of
from shardwright.planner.inlining import inline_calls
from shardwright.planner.microbatch import StepSplit, accumulated, split_step
from shardwright.planner.names import argument_names, output_names
from shardwright.planner.pins import Requirement
from shardwright.planner.rewrites.variables import rewrite_for
from shardwright.planner.segments import Instance, Run, find_runs, find_segments, instances_of


class Program:
    """One module, ready to be planned on any mesh.

    module / text: as planned, after rewrites. rewritten: which arguments and outputs have other dimensions now.
    original / original_text: as it was given. arguments / outputs: their names.
    batch: the dimension of each batch argument, by flat number, of a step cut into micro-batches; else None.
    pins: requirements by node. state: nodes of arguments kept between steps; arriving: of all others.
    """

    def __init__(self, hlo: str | Module, options: PlanOptions) -> None:
        self.options = options
        given = hlo if isinstance(hlo, Module) else parse(hlo)
        self.original_text = hlo if isinstance(hlo, str) else hlo.to_text()
        self.original = given
        split = _split(given, options)
        cut = accumulated(split, options.micro_batches or 1) if split else inline_calls(given)
        self.batch = {number: along.dim + 1 for number, along in split.batch.items()} if split else None
        self.rewritten = rewrite_for(cut, options, _named(given, options).difference(self.batch or ()), given)
        self.module = self.rewritten.module
        self.text = self.original_text if self.module is given else self.module.to_text()
        self.flow = build_dataflow(self.module)
        self.flow.notes += split.notes if split else ()
        self.arguments = argument_names(self.flow, options.argument_names)
        self.outputs = output_names(self.flow, options.output_names)
        self.pins = collect(self.flow, options)
        state = state_arguments(self.flow, options)
        self.state = frozenset(node for number, node in enumerate(self.flow.parameters) if number in state)
        self.arriving = frozenset(self.flow.parameters) - self.state
        self._liveness: Liveness | None = None
        self._structures: dict[Hashable, Structure] = {}

    def structure(self, requirements: Mapping[int, Sequence[Requirement]], extra: Mapping[int, Hashable]) -> Structure:
        """Segments and variables where the nodes of `requirements` may not choose freely.

        extra: keys of further nodes that differ from others of their kind, equal where they do not.
        """
        pinned = {node: tuple(each.key for each in found) for node, found in requirements.items()}
        key = (tuple(sorted(pinned.items())), tuple(sorted(extra.items())) if extra else ())
        found = self._structures.get(key)
        if found is None:
            found = self._structures[key] = Structure(self, pinned, extra)
        return found

    def memory(self, profile: HardwareProfile, hubs: Iterable[Leaf]) -> Memory:
        """What the program stores and when."""
        if self._liveness is None:
            self._liveness = liveness(self.module, profile)
        return Memory(flow=self.flow, liveness=self._liveness, hubs=tuple(hubs))


class Structure:
    """The variables of a program: its layout, segments and runs, for one set of pins."""

    def __init__(self, program: Program, pinned: Mapping[int, Hashable], extra: Mapping[int, Hashable]) -> None:
        flow = program.flow
        self.free = free_nodes(flow, pinned)
        self.segments = find_segments(flow, self.free, program.state)
        keys = dict.fromkeys(program.arriving, ("arriving",))
        for node, what in extra.items():
            keys[node] = (*keys.get(node, ()), what)
        self.layout: Layout = lay_out(flow, self.free, self.segments, pinned, keys)
        self.instances: tuple[Instance, ...] = instances_of(
            flow, self.segments, lambda nodes: variables_of(self.layout, nodes), self.layout.describe
        )
        self.runs: tuple[Run, ...] = find_runs(self.instances)


def _split(module: Module, options: PlanOptions) -> StepSplit | None:
    """The step cut into micro-batches, where that is asked for."""
    return split_step(module, options) if options.micro_batches not in (None, 1) else None


def _named(module: Module, options: PlanOptions) -> set[int]:
    """Flat numbers of the arguments whose dimensions the user pins by name."""
    if not isinstance(options.force, Mapping):
        return set()
    names = list(options.argument_names)
    if not names:
        for parameter in module.entry.parameters:
            names += [parameter.op_name or parameter.name] * len(parameter.shape.leaves)
    return {n for n, name in enumerate(names) for pattern in options.force if name_matches(pattern, name)}
