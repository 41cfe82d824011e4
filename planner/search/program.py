"""The program to plan, read once: rewritten module, dataflow, names, pins, possible partial sums.

Independent of any mesh.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace

from shardwright.cost import HardwareProfile
from shardwright.cost.peak.liveness import Liveness, liveness
from shardwright.cost.peak.memory import constants_bytes
from shardwright.errors import MicroBatchError
from shardwright.hlo import Module, elided
from shardwright.hlo.elided import PRINT_THEM
from shardwright.hlo.entry import parameter_names
from shardwright.options.plan_options import PlanOptions
from shardwright.options.user_options import name_matches
from shardwright.placements import (
    check_compute_types,
    drop_torn_aliases,
    fetch_arguments,
    find_host_values,
    mark_host_values,
    place_results,
    read_boundary,
)
from shardwright.planner.attention import fuse_attention, kernel_limits, note_calls, note_recomputed
from shardwright.planner.clock import Clock
from shardwright.planner.constraints.annotations import VariableShardings, collect_requirements
from shardwright.planner.constraints.forced import ForcedStrategy, force_strategy, state_arguments
from shardwright.planner.constraints.named_pins import pins_by_name, replicate_rest, split_batch
from shardwright.planner.constraints.pins import Requirement, program_meshes, suspicious_axes
from shardwright.planner.costs.kernels import Kernels, find_kernels
from shardwright.planner.costs.rounded_uses import RoundedUses, rounded_uses_of
from shardwright.planner.graph.batch_dim_analysis import TiedDims
from shardwright.planner.graph.dataflow import Dataflow, Leaf, build_dataflow
from shardwright.planner.graph.donation import alias_donors
from shardwright.planner.graph.dynamic_sizes import refuse_dynamic_sizes
from shardwright.planner.graph.imported_shardings import ImportedSharding
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.graph.manual_regions import find_inside, let_enter, number_apart, refuse_manual, torn_region
from shardwright.planner.graph.names import argument_names, output_names
from shardwright.planner.graph.optimized_hlo import NOTE, undo_optimization
from shardwright.planner.graph.per_device_programs import is_optimized, refuse_per_device_program
from shardwright.planner.graph.sharding_calls import find_output_shardings, insert_sharding_calls
from shardwright.planner.graph.source import Source
from shardwright.planner.graph.stack_rows import find_stack_rows
from shardwright.planner.memory.constraint import MemoryModel
from shardwright.planner.memory.recompute import Recomputation, apply_recomputation
from shardwright.planner.microbatch import accumulate_step, split_step
from shardwright.planner.mixtures import Blocks, Mixture, block_mixtures, find_all_mixtures
from shardwright.planner.mixtures.parts import find_parts
from shardwright.planner.mixtures.rows_over import with_no_rows_over
from shardwright.planner.offload import find_optimizer_state, keep_on_host
from shardwright.planner.rewrites.batch_norm import expand_batch_norms
from shardwright.planner.rewrites.batched_lookups import batch_lookups
from shardwright.planner.rewrites.constant_folding import fold_constants
from shardwright.planner.rewrites.initial_values import neutralize_initial_values
from shardwright.planner.rewrites.ragged_forms import write_ragged_products
from shardwright.planner.rewrites.swapped_products import swap_products
from shardwright.planner.rewrites.top_k import expand_top_k
from shardwright.planner.rewrites.variable_views import rewrite_for
from shardwright.planner.rewrites.variadic_reduces import split_variadic_reduces
from shardwright.planner.search.batch_dims import find_batch_dims
from shardwright.planner.segments.cheap_values import expensive_nodes
from shardwright.planner.segments.combinable_collectives import combinable_bytes
from shardwright.planner.segments.dominator_cut import (
    Run,
    SegmentInstance,
    build_instances,
    find_runs,
    find_segments,
    match_isomorphic_variables,
)
from shardwright.planner.segments.overlap import gradients
from shardwright.planner.segments.readiness import Readiness
from shardwright.planner.segments.variables import ProgramVariables, build_variables, cheap_nodes, variables_of
from shardwright.planner.strategies.rule_cache import RuleCache
from shardwright.plans.shardings import Mesh


class Program:
    """One module, ready to be planned on any mesh.

    module: as planned, after rewrites.
    unsplit: before dimension splitting.
    rewritten: arguments and outputs with changed dimensions.
    original / original_text: as given.
    arguments / outputs: their names.
    batch: batch argument (flat number) → dimension, in a step cut into micro-batches; otherwise None.
    pins: requirements by node.
    on_host: arguments kept on the host by choice, with the outputs in their place, by flat number.
    twins: rematerialized node → original node.
    attention: what became of its attention.
    mixture_parts: parts of its mixtures of experts.
    own_shardings: the program's own shardings of arguments and outputs, when given.
    state: nodes of arguments kept between steps.
    fed_arguments: nodes of all other arguments, but for those that workers read themselves.
    rules: strategy rules of its instructions.
    profile: device profile, identifies values too expensive to recompute per consumer; None: no value is.
    clock: may end the reading.
    devices: their profile, for their kernels alone, where there is no `profile`.
    blocks: of its mixtures of experts; None: their rows stay with their tokens.
    mixtures: those that may be in blocks, of the program as read.
    """

    def __init__(
        self,
        hlo: str | Module | Source,
        options: PlanOptions,
        profile: HardwareProfile | None = None,
        clock: Clock | None = None,
        devices: HardwareProfile | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.options, self.profile, self.clock = options, profile, clock or Clock()
        source = Source(hlo) if isinstance(hlo, str) else hlo
        self.original = source if isinstance(source, Module) else source.module
        self.original_text = source.to_text() if isinstance(source, Module) else source.text
        refuse_manual(self.original)
        refuse_per_device_program(self.original)
        refuse_dynamic_sizes(self.original)
        check_compute_types(self.original)
        module = place_results(undo_optimization(self.original))
        self._host_arguments = read_boundary(self.original)[0]
        outputs = tuple(find_output_shardings(module.entry.root))
        self.own_shardings = VariableShardings()
        if options.constraints == "keep":
            self.own_shardings = VariableShardings.of(module, outputs)
        # Common start of all variants: shardings as calls, functions inlined, attention as calls.
        self._base_module = inline_calls(insert_sharding_calls(alias_donors(module), outputs))
        refuse_manual(self._base_module, inlined=True)
        self.mixture_parts = find_parts(self._base_module)
        self.mixtures: Sequence[Mixture] = ()
        if options.rewrites != "none":
            self.mixtures = find_all_mixtures(self._base_module)
        self._base_module = block_mixtures(self._base_module, blocks, profile)
        if options.rewrites != "none":
            self._base_module = write_ragged_products(self._base_module, profile or devices)
        self._base_module = with_no_rows_over(self._base_module)
        self._own_attention = note_calls(self._base_module)
        kernels = profile or devices
        limits = kernel_limits(options.fused_attention, None if kernels is None else kernels.attention)
        if limits is not None and options.rewrites != "none":
            fused = fuse_attention(self._base_module, limits)
            self._base_module = fused.module
            self._own_attention += fused.notes
        self.rules = RuleCache()
        self._optimizer_state: Mapping[int, int] | None = None
        self.on_host: Mapping[int, int] = self.optimizer_state if options.offload == "optimizer" else {}
        self._rewrite(None, options.micro_batches or 1)

    @property
    def optimizer_state(self) -> Mapping[int, int]:
        """Arguments that only the update reads, with their outputs (`offload.find_optimizer_state`)."""
        if self._optimizer_state is None:
            there = find_host_values(self._base_module, self._host_arguments).arguments
            state = find_optimizer_state(build_dataflow(self._base_module))
            self._optimizer_state = {number: output for number, output in state.items() if number not in there}
        return self._optimizer_state

    def with_state_on_host(self, state: Mapping[int, int]) -> Program:
        """The same program with these arguments, and the outputs in their place, on the host."""
        variant = copy(self)
        variant.rules, variant.on_host = RuleCache(self.rules), state
        variant._rewrite(None, self.micro_batches)
        return variant

    def rewrite_variant(self, again: Recomputation | None, micro_batches: int) -> Program:
        """The same program with rematerialization and this many micro-batches. Raises MicroBatchError when it does not
        split."""
        variant = copy(self)
        variant.rules = RuleCache(self.rules)
        variant._rewrite(again, micro_batches)
        return variant

    def _rewrite(self, again: Recomputation | None, micro_batches: int) -> None:
        options, twins = self.options, dict[str, str]()
        module, self.attention = self._base_module, self._own_attention
        self.clock.check()
        module = fetch_arguments(module, self._host_arguments)
        if options.rewrites != "none":
            module = fold_constants(module)
            if self.profile is not None and self.profile.compiler.runs("folds_transposes"):
                module = swap_products(module)
            module = neutralize_initial_values(split_variadic_reduces(batch_lookups(module)))
            module = expand_batch_norms(expand_top_k(module))
        if again is not None:
            rewritten = apply_recomputation(module, again)
            module, twins = rewritten.module, dict(rewritten.twins)
            self.attention = note_recomputed(self._own_attention, module, twins)
        self.clock.check()
        split = split_step(module, options) if micro_batches > 1 else None
        self.clock.check()
        if split is not None:
            module = accumulate_step(split, micro_batches)
            let_enter(module)
            number_apart(module)
            torn = torn_region(module)
            if torn is not None:
                raise MicroBatchError(
                    f"a manual region (shard_map) computes {torn.name} for all micro-batches together",
                    where=str(module.source(torn) or torn.name),
                    remedy="plan without micro-batches, or compute it outside of the region",
                )
            self.clock.check()
        self.micro_batches = micro_batches
        self.batch: Mapping[int, int] | None = None
        if split is not None:
            self.batch = {number: along.dim + 1 for number, along in split.batch.items()}
        named = _arguments_pinned_by_name(self.original, options) | _split_variables(self.own_shardings.arguments)
        named = named.difference(self.batch or ())
        module = self._mark_memories(module, self._host_arguments)
        self.rewritten = rewrite_for(
            module, options, named, self.original, pinned_outputs=_split_variables(self.own_shardings.outputs)
        )
        self.clock.check()
        self.module = self._keep_on_host(self.rewritten.module)
        self.unsplit = self.module if self.rewritten.module is module else self._keep_on_host(module)
        self.rewritten = replace(self.rewritten, module=self.module)
        self._text: str | None = None
        self.rules.stack_rows = find_stack_rows(self.module)
        self.rules.inside = find_inside(self.module)
        self.flow = build_dataflow(self.module)
        self.flow.notes += split.notes if split else ()
        self.flow.notes += _note_elided_constants(self.original)
        self.flow.notes += [NOTE] if is_optimized(self.original) else []
        self.arguments = argument_names(self.flow, options.argument_names)
        self.outputs = output_names(self.flow, options.output_names)
        self.pins = collect_requirements(self.flow, options, self.own_shardings, self.batch)
        if options.mesh is None and not program_meshes(self.pins):
            self.flow.notes += suspicious_axes(self.flow, self.pins)
        state = state_arguments(self.flow, options)
        self.state = frozenset(node for number, node in enumerate(self.flow.parameters) if number in state)
        parameters = self.flow.parameters
        local = {parameters[number] for number in options.local_arguments if number < len(parameters)}
        self.fed_arguments = frozenset(parameters) - self.state - local
        self.twins = _pair_nodes(self.flow, twins)
        self._liveness: Liveness | None = None
        self._kernels: Kernels | None = None
        self._expensive_nodes: frozenset[int] | None = None
        self._structures: dict[Hashable, ProgramStructure] = {}
        self._node_keys: dict[Hashable, int] = {}  # numbers of `build_structure`'s node keys
        self._gradients: frozenset[Leaf] | None = None
        self._rounded_uses: RoundedUses | None = None
        self._readiness: Readiness | None = None
        self._combinable_bytes: Mapping[Leaf, int] | None = None
        self._batch_dims: Mapping[int, int] | None = None
        self._ties: dict[tuple[bool, ...], TiedDims] = {}

    def _mark_memories(self, module: Module, arguments: frozenset[int]) -> Module:
        """The module with the memory of every value that lies on the host in its shape; no alias goes between
        memories."""
        on_host = find_host_values(module, arguments)
        return mark_host_values(drop_torn_aliases(module, on_host), on_host)

    def _keep_on_host(self, module: Module) -> Module:
        """The module with the arguments of `on_host` there, and the memory of every value in its shape."""
        return self._mark_memories(keep_on_host(module, self.on_host), self._host_arguments.union(self.on_host))

    def adopt_shardings(self, shardings: VariableShardings, batch: Mapping[int, int] | None) -> None:
        """Adopt another program's shardings of the same arguments and outputs; batch: see the class."""
        self.own_shardings, self.batch = shardings, batch
        self.pins = collect_requirements(self.flow, self.options, shardings, batch)

    @property
    def text(self) -> str:
        """The module as planned, as text."""
        if self._text is None:
            self._text = self.original_text if self.module is self.original else self.module.to_text()
        return self._text

    @property
    def state_bytes(self) -> int:
        """Bytes of all arguments kept between steps in the devices' memory, unsharded."""
        shapes = (shape for node in self.state for shape in self.flow.nodes[node].shapes)
        return sum(shape.size_bytes for shape in shapes if not shape.is_on_host)

    @property
    def optimizer_state_bytes(self) -> int:
        """Bytes of `optimizer_state`, unsharded."""
        nodes, parameters = self.flow.nodes, self.flow.parameters
        return sum(shape.size_bytes for number in self.optimizer_state for shape in nodes[parameters[number]].shapes)

    @property
    def gradients(self) -> frozenset[Leaf]:
        """Values whose communication may overlap compute."""
        if self._gradients is None:
            self._gradients = gradients(self.flow)
        return self._gradients

    @property
    def rounded_uses(self) -> RoundedUses:
        """Uses of values that the compiler sends as bfloat16."""
        if self._rounded_uses is None:
            self._rounded_uses = rounded_uses_of(self.flow, self.profile)
        return self._rounded_uses

    @property
    def readiness(self) -> Readiness:
        """Nodes computed before the gradients."""
        if self._readiness is None:
            self._readiness = Readiness(self.flow, self.gradients)
        return self._readiness

    @property
    def combinable_bytes(self) -> Mapping[Leaf, int]:
        """Value → bytes of all collectives a compiler may combine with its own."""
        if self._combinable_bytes is None:
            self._combinable_bytes = combinable_bytes(self.flow)
        return self._combinable_bytes

    @property
    def kernels(self) -> Kernels:
        """Fused kernels of the nodes."""
        if self._kernels is None:
            merges = self.profile is not None and self.profile.compiler.runs("merges_loops")
            self._kernels = find_kernels(self.flow, merges=merges)
        return self._kernels

    def cheap_nodes(self, pinned: Iterable[int], *, with_stored: bool = False) -> list[bool]:
        """Per node, whether each consumer recomputes it in the sharding it needs. Like `variables.cheap_nodes`, without
        expensive nodes."""
        if self._expensive_nodes is None:
            self._expensive_nodes = (
                expensive_nodes(self.flow, self.kernels, self.profile) if self.profile is not None else frozenset()
            )
        return cheap_nodes(self.flow, self._expensive_nodes.union(pinned), with_stored=with_stored)

    def resolve_force(self, options: PlanOptions, mesh: Mesh) -> ForcedStrategy:
        """The forced strategy of `options` on one mesh. Raises like `constraints.forced.force_strategy`."""
        if options.force is None:
            return ForcedStrategy()
        if isinstance(options.force, str):
            return force_strategy(self.flow, self.arguments, options, mesh, self._find_batch_dims())
        pinned = pins_by_name(self.flow, self.arguments, options.force, self.batch or {})
        if options.rest == "search":
            return ForcedStrategy(requirements=pinned)
        if options.rest == "replicated":
            return replicate_rest(self.flow, pinned)
        return split_batch(self.flow, self.arguments, options, mesh, self._find_batch_dims(), pinned)

    def _find_batch_dims(self) -> Mapping[int, int]:
        if self._batch_dims is None:
            self._batch_dims = self.batch or find_batch_dims(self.module, self.flow, self.options, self.rules)
        return self._batch_dims

    def ties(self, requirements: Mapping[int, Sequence[Requirement]]) -> TiedDims:
        """Tied dimensions when the nodes of `requirements` are pinned."""
        free = tuple(self.cheap_nodes(requirements, with_stored=True))
        if free not in self._ties:
            self._ties[free] = TiedDims(self.flow, free, self.rules)
        return self._ties[free]

    def build_structure(
        self, requirements: Mapping[int, Sequence[Requirement]], extra: Mapping[int, Hashable]
    ) -> ProgramStructure:
        """Segments and variables when the nodes of `requirements` are pinned.

        extra: node → key; distinguishes nodes otherwise equal.
        """
        pinned = {
            node: tuple(requirement.key for requirement in node_requirements)
            for node, node_requirements in requirements.items()
        }
        numbers = self._node_keys  # few distinct keys, cheap to compare and hash
        marks = {node: numbers.setdefault(what, len(numbers)) for node, what in extra.items()}
        key = (tuple(sorted(pinned.items())), tuple(sorted(marks.items())))
        structure = self._structures.get(key)
        if structure is None:
            structure = self._structures[key] = ProgramStructure(self, pinned, marks)
        return structure

    def build_memory_model(self, profile: HardwareProfile, hubs: Iterable[Leaf], margin: float) -> MemoryModel:
        """The memory model: buffers and their lifetimes.

        hubs: values with a shared layout.
        margin: fraction of the temporaries required in addition.
        """
        if self._liveness is None:
            self._liveness = liveness(self.module, profile)
        hoists = profile.compiler.hoists_loop_invariants
        return MemoryModel(
            flow=self.flow,
            liveness=self._liveness,
            shared_layouts=tuple(hubs),
            margin=margin,
            hoists=hoists,
            constants_bytes=constants_bytes(self.module),
        )


class ProgramStructure:
    """The variables of a program under one set of pins, with its segments and runs."""

    def __init__(self, program: Program, pinned: Mapping[int, Hashable], extra: Mapping[int, Hashable]) -> None:
        flow = program.flow
        self.is_cheap_to_recompute = program.cheap_nodes(pinned)
        self.segments = find_segments(flow, self.is_cheap_to_recompute, program.state, program.twins)
        keys: dict[int, Hashable] = dict(extra)
        for node in program.fed_arguments:
            keys[node] = ("arriving", extra.get(node))
        self.variables: ProgramVariables = build_variables(
            flow,
            self.is_cheap_to_recompute,
            self.segments,
            pinned,
            keys,
            program.kernels,
            program.rules,
            program.gradients,
            program.rounded_uses,
        )
        self.instances: tuple[SegmentInstance, ...] = build_instances(
            flow, self.segments, lambda nodes: variables_of(self.variables, nodes), self.variables.describe
        )
        self.runs: tuple[Run, ...] = find_runs(self.instances)
        self.isomorphic_variables = match_isomorphic_variables(self.instances)


def _note_elided_constants(module: Module) -> list[str]:
    """Note of constants with elided values."""
    constants = elided(module)
    if not constants:
        return []
    names = ", ".join(constant.name for constant in constants[:3]) + (", …" if len(constants) > 3 else "")
    return [f"{names}: the text leaves the value out; planned as unknown, not to be run: {PRINT_THEM}"]


def _pair_nodes(flow: Dataflow, twins: Mapping[str, str]) -> dict[int, int]:
    """Pairs of instructions as pairs of their nodes."""
    nodes: dict[str, list[int]] = {}
    for node in flow.nodes if twins else ():
        nodes.setdefault(node.instruction.name, []).append(node.index)
    return {i: nodes[old][0] for new, old in twins.items() if old in nodes for i in nodes.get(new, ())}


def _split_variables(shardings: Mapping[int, ImportedSharding]) -> set[int]:
    """Numbers of the variables with dimensions split by the program."""
    return {number for number, sharding in shardings.items() if sharding.is_split}


def _arguments_pinned_by_name(module: Module, options: PlanOptions) -> set[int]:
    """Flat numbers of the arguments with dimensions pinned by name."""
    if not isinstance(options.force, Mapping):
        return set()
    names = options.argument_names or parameter_names(module)
    by_dim = [pattern for pattern, pins in options.force.items() if not isinstance(pins, str)]
    return {n for n, name in enumerate(names) for pattern in by_dim if name_matches(pattern, name)}
