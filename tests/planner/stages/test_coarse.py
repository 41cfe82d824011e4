"""What belongs together: products, their backward products, their variables and updates."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwright.planner.stages.clustering import Clustering
from tests.planner.stages.stage_programs import split_and_parts


def part_of_arguments(coarse: Clustering) -> dict[str, int]:
    nodes = [coarse.flow.nodes[i] for i in coarse.flow.parameters]
    return {node.instruction.op_name: coarse.first[node.index] for node in nodes}


def parts_of_products(coarse: Clustering, *operands: str) -> Counter[int]:
    """Parts of the products that read arguments of these names, through casts and transposes of them."""
    named = {node.index for node in coarse.flow.nodes if node.instruction.op_name in operands and node.is_value}
    for node in coarse.flow.nodes:
        if not node.is_value and node.instruction.opcode in ("transpose", "convert", "reshape"):
            named |= {node.index for use in node.uses if use.source[0] in named}
    counts: Counter[int] = Counter()
    for node in coarse.flow.nodes:
        if node.instruction.opcode == "dot" and any(use.source[0] in named for use in node.uses):
            counts[coarse.first[node.index]] += 1
    return counts


def assert_values_go_one_way(coarse: Clustering) -> None:
    arguments = set(coarse.flow.parameters)
    ahead = coarse.forward | coarse.fed
    for node in coarse.flow.nodes:
        if node.index in arguments or node.index in coarse.once or coarse.first[node.index] < 0:
            continue
        for use in node.uses:
            source = use.source[0]
            if source in arguments or coarse.first[source] < 0 or source > node.index:
                continue
            if node.index in ahead:
                assert source in ahead
                assert coarse.first[source] <= coarse.first[node.index]
            elif source not in ahead:
                assert coarse.first[source] >= coarse.first[node.index], (node.instruction, source)


@pytest.mark.parametrize("name", ["dense", "tied", "branches", "remat", "scanned"])
def test_values_go_one_way(name: str) -> None:
    """Forward values to later parts, gradients to earlier ones, whatever reads them."""
    assert_values_go_one_way(split_and_parts(name)[1])


def test_layers_lie_with_their_gradients_and_moments() -> None:
    _, coarse = split_and_parts("dense")
    parts = part_of_arguments(coarse)
    assert len(coarse.parts) >= 2 * 4 + 2
    for layer in range(4):
        up = parts[f"params['l{layer}']['up']"]
        assert parts[f"params['l{layer}']['b']"] == up
        assert parts[f"params['l{layer}']['down']"] == up + 1
        for kind in ("mu", "nu"):
            for name, part in (("up", up), ("b", up), ("down", up + 1)):
                assert parts[f"state[1][0].{kind}['l{layer}']['{name}']"] == part, (kind, name)
        # forward, and backward to what it read; the weight's gradient is no reader of the weight
        assert parts_of_products(coarse, f"params['l{layer}']['up']") == {up: 2}


def test_weight_gradients_lie_with_their_weights() -> None:
    split, coarse = split_and_parts("dense")
    parts = part_of_arguments(coarse)
    weights = [parts[f"params['l{layer}']['{name}']"] for layer in range(4) for name in ("up", "down")]
    nodes = {n.instruction.name: n.index for n in coarse.flow.nodes if not n.is_value}
    sums = [s for s in split.accumulators if sorted(s.shape.dimensions) == [16, 64]]
    assert sorted(coarse.first[nodes[s.name]] for s in sums) == sorted(weights)


def test_recomputed_layers_stay_whole() -> None:
    """What a layer computes again lies with what it computed, so a layer is one part, and no more than that."""
    _, coarse = split_and_parts("remat")
    parts = part_of_arguments(coarse)
    layers = [parts[f"params['l{layer}']['up']"] for layer in range(4)]
    assert sorted(set(layers)) == layers
    for layer, part in enumerate(layers):
        assert parts[f"params['l{layer}']['down']"] == part


def test_a_scan_is_one_part_a_layer() -> None:
    _, coarse = split_and_parts("scanned")
    rows = [part for part in coarse.parts if part.rows > 1]
    assert [part.row for part in rows] == list(range(6))
    first = coarse.parts.index(rows[0])
    parts = part_of_arguments(coarse)
    for name in ("params['layers']['w']", "state[1][0].mu['layers']['w']", "state[1][0].nu['layers']['b']"):
        assert parts[name] == first
    assert sorted(loop.is_descending for loop in coarse.stacks.values()) == [False, True]


def test_branches_are_parts_of_their_own() -> None:
    _, coarse = split_and_parts("branches")
    parts = part_of_arguments(coarse)
    names = [f"params['{name}']" for name in ("stem", "a1", "a2", "b1", "b2", "join")]
    assert len({parts[name] for name in names}) == 6
