"""Which arguments are the optimizer's state, from the program alone.

The state of a step are the arguments that an output replaces in place. Forward and backward pass read the parameters;
what they do not read, only the update reads: moments, momenta, master copies, running averages of parameters. It is
needed for the time of its update, and may lie on the host until then.

An argument is read by the update alone where either holds:

- no product, lookup or other instruction with a layout choice of its own depends on it (`optimizer_nodes`), and the
  program has one: of a step that only updates everything is as much a parameter;
- some results are no state (a loss, metrics), and none of them depends on it: an optimizer may have products of its
  own (Shampoo, Muon), whose results nobody but the next step sees.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.planner.constraints.forced import state_in_compute
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.offload.placements import has_flat_variables
from shardwright.planner.segments.overlap import optimizer_nodes
from shardwright.planner.tuning import MIN_OFFLOADED_BYTES


def find_optimizer_state(flow: Dataflow) -> Mapping[int, int]:
    """Flat number of each such argument → that of the output in its place, by argument; none below
    `MIN_OFFLOADED_BYTES`.

    Without aliases (nothing is donated) nothing is state: the old values stay beside the new ones. Nor is what tuples
    hold, of programs that are not JAX's.
    """
    if not has_flat_variables(flow.module):
        return {}
    outputs = {argument: output for output, argument in flow.aliases.items()}
    in_compute = state_in_compute(flow, frozenset(outputs))
    has_results = len(flow.outputs) > len(flow.aliases) and bool(in_compute)
    is_late = optimizer_nodes(flow)
    has_passes = not all(is_late)
    return {
        number: outputs[number]
        for number, node in enumerate(flow.parameters)
        if number in outputs
        and ((is_late[node] and has_passes) or (has_results and number not in in_compute))
        and flow.nodes[node].shapes[0].size_bytes >= MIN_OFFLOADED_BYTES
        and _is_updated(flow, node)
    }


def _is_updated(flow: Dataflow, argument: int) -> bool:
    """Whether the output in the argument's place is another value than the argument."""
    return any(use.source[0] != argument for use in flow.nodes[argument].uses)
