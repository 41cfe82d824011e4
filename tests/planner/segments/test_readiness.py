"""When gradients are ready, against every order that small programs can be computed in."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import pytest

from shardwright.hlo import parse
from shardwright.planner.graph.dataflow import Dataflow, Leaf, build_dataflow
from shardwright.planner.segments.overlap import gradients
from shardwright.planner.segments.readiness import CombinedCollective, Readiness

_DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
_ADD = "add { x = f32[] parameter(0) y = f32[] parameter(1) ROOT z = f32[] add(x, y) }"


def program(sources: Sequence[Sequence[int]], sums: Sequence[int]) -> Dataflow:
    """Products by number, each of those it reads; what the products `sums` read is added up, and returned."""
    lines = ["given = f32[4,4] parameter(0)", "zero = f32[] constant(0)"]
    for number, item in enumerate(sources):
        names = [f"made{each}" for each in item] or ["given"]
        last = names[0]
        for place, name in enumerate(names[1:]):
            lines.append(f"sum{number}.{place} = f32[4,4] multiply({last}, {name})")
            last = f"sum{number}.{place}"
        lines.append(
            f"made{number} = f32[4,4] dot({last}, given), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
        )
    for number in sums:
        lines.append(f"gradient{number} = f32[4] reduce(made{number}, zero), dimensions={{0}}, to_apply=add")
        lines.append(f"new{number} = f32[4] negate(gradient{number})")
    types = ", ".join("f32[4]" for _ in sums)
    lines.append(f"ROOT all = ({types}) tuple({', '.join(f'new{number}' for number in sums)})")
    return build_dataflow(parse("HloModule small\n" + _ADD + "\nENTRY main {\n" + "\n".join(lines) + "\n}\n"))


def number_nodes(flow: Dataflow) -> Mapping[str, int]:
    return {node.instruction.name: node.index for node in flow.nodes if not node.is_value}


def moves_of(flow: Dataflow, sums: Mapping[int, float]) -> list[CombinedCollective]:
    at = number_nodes(flow)
    return [CombinedCollective((((at[f"gradient{each}"], 0), "main"),), seconds) for each, seconds in sums.items()]


def hidden_s_of(flow: Dataflow, moves: Sequence[CombinedCollective], seconds: Mapping[str, float]) -> float:
    readiness = Readiness(flow, gradients(flow))
    times = [(node, seconds.get(node.instruction.name, 0.0)) for node in flow.nodes if not node.is_value]
    result = readiness.overlap_s(moves, times)
    assert result <= sum(taken for node, taken in times if node.index in readiness.hiding_nodes) + 1e-9
    return result


def orders(sources: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    for order in permutations(range(len(sources))):
        place = {number: at for at, number in enumerate(order)}
        if all(place[each] < place[number] for number, found in enumerate(sources) for each in found):
            yield order


def step_s(order: Sequence[int], seconds: Sequence[float], sums: Mapping[int, float]) -> float:
    """Until all is computed and moved, first come, first served."""
    clock = channel = 0.0
    for number in order:
        clock += seconds[number]
        if number in sums:
            channel = max(clock, channel) + sums[number]
    return max(clock, channel)


@pytest.mark.parametrize("seed", range(40))
def test_a_step_is_one_that_some_order_attains(seed: int) -> None:
    chance = random.Random(seed)
    sources = [sorted(chance.sample(range(number), min(number, chance.randint(0, 2)))) for number in range(6)]
    taken = [chance.choice((0.5, 1.0, 2.0, 4.0)) for _ in sources]
    sums = {number: chance.choice((0.25, 1.0, 3.0)) for number in chance.sample(range(6), 3)}
    flow = program(sources, sorted(sums))
    hidden = hidden_s_of(flow, moves_of(flow, sums), {f"made{number}": each for number, each in enumerate(taken)})
    found_s = sum(taken) + sum(sums.values()) - hidden
    steps = [step_s(order, taken, sums) for order in orders(sources)]
    best_s = min(steps)
    assert any(each == pytest.approx(found_s) for each in steps)
    assert found_s <= best_s + max(sums.values()) + 1e-9


def test_gradients_are_ready_by_what_they_depend_on_not_by_the_text() -> None:
    backward = [[], [0], [1], [2], [0], [1], [2]]  # a chain, and last in the text what each link's gradient is made of
    flow = program(backward, [4, 5, 6, 3])
    seconds = {f"made{number}": 1.0 for number in range(7)}
    moves = moves_of(flow, {3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0})
    assert hidden_s_of(flow, moves, seconds) == pytest.approx(3.0)  # all but the last one's


def test_what_is_combined_is_ready_when_its_last_member_is() -> None:
    flow = program([[], [0], [1], [2]], [0, 1, 2])
    at = number_nodes(flow)
    seconds = {f"made{number}": 1.0 for number in range(4)}
    leaves: list[tuple[Leaf, str]] = [((at[f"gradient{number}"], 0), "main") for number in range(3)]
    apart = hidden_s_of(flow, [CombinedCollective((each,), 1.0) for each in leaves], seconds)
    together = hidden_s_of(flow, [CombinedCollective(tuple(leaves), 3.0)], seconds)
    assert (apart, together) == (pytest.approx(3.0), pytest.approx(1.0))


def test_the_optimizer_hides_nothing() -> None:
    flow = program([[], [0]], [0, 1])
    moves = moves_of(flow, {0: 1.0, 1: 1.0})
    seconds = {"made0": 1.0, "made1": 0.5}
    assert hidden_s_of(flow, moves, {**seconds, "new0": 9.0, "new1": 9.0}) == hidden_s_of(flow, moves, seconds) == 0.5


LOOP = (
    "HloModule looped\n"
    + _ADD
    + """
body {
  state = (s32[], f32[4,4], f32[8,4]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = f32[4,4] get-tuple-element(state), index=1
  all = f32[8,4] get-tuple-element(state), index=2
  one = s32[] constant(1)
  zero = f32[] constant(0)
  first = f32[4,4] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  next = f32[4,4] dot(first, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  gradient = f32[4] reduce(first, zero), dimensions={0}, to_apply=add
  row = f32[1,4] reshape(gradient)
  start = s32[] constant(0)
  kept = f32[8,4] dynamic-update-slice(all, row, i, start)
  more = s32[] add(i, one)
  ROOT made = (s32[], f32[4,4], f32[8,4]) tuple(more, next, kept)
}
condition {
  state = (s32[], f32[4,4], f32[8,4]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  end = s32[] constant(8)
  ROOT goes_on = pred[] compare(i, end), direction=LT
}
ENTRY main {
  given = f32[4,4] parameter(0)
  begin = s32[] constant(0)
  nothing = f32[] constant(0)
  none = f32[8,4] broadcast(nothing), dimensions={}
  state = (s32[], f32[4,4], f32[8,4]) tuple(begin, given, none)
  loop = (s32[], f32[4,4], f32[8,4]) while(state), condition=condition, body=body
  out = f32[4,4] get-tuple-element(loop), index=1
  kept = f32[8,4] get-tuple-element(loop), index=2
  after = f32[4,4] dot(out, given), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  rest = f32[4] reduce(after, nothing), dimensions={0}, to_apply=add
  ROOT both = (f32[8,4], f32[4]) tuple(kept, rest)
}
"""
)


def test_a_loop_hides_within_each_pass_or_is_waited_for() -> None:
    flow = build_dataflow(parse(LOOP))
    at = {node.instruction.name: node.index for node in flow.nodes if not node.is_value}
    (carried,) = [node.index for node in flow.nodes if node.is_value and node.leaf == 2 and node.computation == "body"]
    seconds = {"first": 8.0, "next": 8.0, "after": 2.0}
    inside, behind = ((at["gradient"], 0), "body"), ((carried, 0), "main")
    assert hidden_s_of(flow, [CombinedCollective((inside,), 5.0)], seconds) == 5.0
    assert hidden_s_of(flow, [CombinedCollective((inside,), 9.0)], seconds) == 8.0  # `next` of each pass
    assert hidden_s_of(flow, [CombinedCollective((behind,), 9.0)], seconds) == 2.0  # `after`, once the loop has ended
    assert hidden_s_of(flow, [CombinedCollective((inside,), 9.0), CombinedCollective((behind,), 9.0)], seconds) == 10.0


def test_ten_thousand_nodes_take_a_moment() -> None:
    links = 2500
    flow = program([[]] + [[number] for number in range(links)], range(1, links + 1))
    begun = time.process_time()
    readiness = Readiness(flow, gradients(flow))
    moves = moves_of(flow, dict.fromkeys(range(1, links + 1), 1e-3))
    times = [(node, 1e-3) for node in flow.nodes if not node.is_value]
    assert readiness.overlap_s(moves, times) > 0
    assert time.process_time() - begun < 5
