"""Where message passing of an earlier search ended, kept for searches of nearly the same program to begin with.

On each mesh a search moves costs between decisions until what is left to every decision and every pair of them bounds
the plan (`dual`). For the same program with one more annotation nearly all of that stays as it is, and with other sizes
it is not far off: segments that are in balance already take a round to see it, and only what did change is worked out.
Moving costs changes no assignment's sum. So, whatever is begun with, plans and bounds are of the new problem alone.

Decisions are told by the numbers of the program's nodes, annotations not counted, and states by what their strategies
are: both mean the same in another program of the same outline. The repeats of a run share what is said of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from shardwright.config import IDENTITY_TARGETS
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.segments.segment_chain import Chain, Key
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.pbqp import IntArray
from shardwright.planner.solver.warm_start import VariableImage, WarmStart, translate
from shardwright.planner.strategies.expansion import Strategy
from shardwright.shardings import TensorSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDecision:
    """What stands for the same decision in all repeats of a run. labels: of its states."""

    repeats: int
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedMessages:
    """Where the search on one mesh ended.

    numbers: per node (counted without annotations) and leaf, its decision. start: by the decisions' numbers.
    least_s: what was proven of all plans whose repeats decide alike.
    """

    decisions: tuple[SavedDecision, ...]
    numbers: Mapping[Variable, int]
    warm_start: WarmStart[int]
    lower_bound_s: float

    @classmethod
    def of(cls, chain: Chain, start: WarmStart[Key], least_s: float) -> SavedMessages:
        """Of a chain, the end of whose search `start` is."""
        known = sorted({key for pair in start.moved for key in pair}.union(start.states))
        number_of = {key: number for number, key in enumerate(known)}
        nodes, labels = number_nodes(chain.graph.flow), _StateLabels()
        numbers = {}
        for segment, instance in enumerate(chain.instances):
            for position, (node, leaf) in enumerate(instance.variables[: instance.own_count]):
                number = number_of.get(chain.key(segment, position))
                if number is not None and node in nodes:
                    numbers[nodes[node], leaf] = number
        places = {
            key: [VariableImage(number, np.arange(chain.state_count(key)), chain.repeats(key))]
            for key, number in number_of.items()
        }
        return cls(
            decisions=tuple(
                SavedDecision(repeats=chain.repeats(key), labels=labels.labels_of(chain, key)) for key in known
            ),
            numbers=numbers,
            warm_start=translate(start, places, {key: chain.repeats(key) for key in known}),
            lower_bound_s=least_s,
        )

    def to_warm_start(self, chain: Chain) -> WarmStart[Key]:
        """A start for the search of another chain, as far as its decisions were known."""
        nodes, labels = number_nodes(chain.graph.flow), _StateLabels()
        left, counts = chain.states(), Counter[tuple[int, Key]]()
        for segment, instance in enumerate(chain.instances):
            for position, (node, leaf) in enumerate(instance.variables[: instance.own_count]):
                number, key = self.numbers.get((nodes.get(node, -1), leaf)), chain.key(segment, position)
                if number is not None and key in left:
                    counts[number, key] += 1
        places: dict[int, list[VariableImage[Key]]] = {}
        for (number, key), count in counts.items():
            states = labels.match(self.decisions[number].labels, labels.labels_of(chain, key))
            places.setdefault(number, []).append(VariableImage(key, states, count))
        return translate(self.warm_start, places, {number: each.repeats for number, each in enumerate(self.decisions)})

    def encode(self) -> bytes:
        """As bytes, which `decode` reads."""
        texts: dict[str, int] = {}
        said = {
            "decisions": [
                [each.repeats, [texts.setdefault(label, len(texts)) for label in each.labels]]
                for each in self.decisions
            ],
            "numbers": [[node, leaf, number] for (node, leaf), number in self.numbers.items()],
            "pairs": list(self.warm_start.moved),
            "states": list(self.warm_start.states.items()),
            "least_s": self.lower_bound_s,
            "texts": list(texts),
        }
        seconds = [costs for ends in self.warm_start.moved.values() for costs in ends]
        return json.dumps(said).encode() + b"\n" + np.concatenate([[], *seconds]).astype("<f4").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> SavedMessages:
        """Raises ValueError, TypeError, KeyError or IndexError where `data` is nothing that `encode` wrote."""
        header, body = data.split(b"\n", 1)
        said, seconds = json.loads(header), np.frombuffer(body, "<f4").astype(np.float64)
        texts = said["texts"]
        decisions = tuple(
            SavedDecision(repeats=repeats, labels=tuple(texts[i] for i in labels))
            for repeats, labels in said["decisions"]
        )
        pairs = [(a, b) for a, b in said["pairs"]]
        sizes = [len(decisions[number].labels) for pair in pairs for number in pair]
        if sum(sizes) != len(seconds):
            raise ValueError("the messages are not those of these decisions")
        ends = iter(np.split(seconds, np.cumsum(sizes)[:-1]) if sizes else ())
        return cls(
            decisions=decisions,
            numbers={(node, leaf): number for node, leaf, number in said["numbers"]},
            warm_start=WarmStart(moved={pair: (next(ends), next(ends)) for pair in pairs}, states=dict(said["states"])),
            lower_bound_s=float(said["least_s"]),
        )


def opcode_digest(flow: Dataflow) -> bytes:
    """Hash of the opcodes of a program's nodes, in the order in which messages number them."""
    return sha256(" ".join(flow.nodes[node].instruction.opcode for node in number_nodes(flow)).encode()).digest()


def number_nodes(flow: Dataflow) -> dict[int, int]:
    """The numbers of the nodes that are no annotations."""
    kept = (n.index for n in flow.nodes if n.instruction.get("custom_call_target") not in IDENTITY_TARGETS)
    return {node: number for number, node in enumerate(kept)}


class _StateLabels:
    """Says strategies in words, those of equal sets once."""

    def __init__(self) -> None:
        self._shardings: dict[TensorSharding, str] = {}
        self._sets: dict[int, tuple[str, ...]] = {}
        self._places: dict[tuple[tuple[str, ...], int], IntArray] = {}

    def labels_of(self, chain: Chain, key: Key) -> tuple[str, ...]:
        """Of the states of a decision."""
        strategies = chain.graph.set_of(chain.variable(key)).strategies
        found = self._sets.get(id(strategies))
        if found is None:
            found = self._sets[id(strategies)] = tuple(map(self._label, strategies))
        return found

    def match(self, known: tuple[str, ...], wanted: tuple[str, ...]) -> IntArray:
        """Where each of `wanted`, which `of` gave, is among the known ones; -1 where it is not."""
        found = self._places.get((known, id(wanted)))
        if found is None:
            place = {label: i for i, label in enumerate(known)}
            found = self._places[known, id(wanted)] = np.array([place.get(label, -1) for label in wanted], np.int64)
        return found

    def _label(self, strategy: Strategy) -> str:
        """What tells a strategy from others of its instruction, in any size."""
        lies = [self._sharding(sharding) for sharding in (*strategy.operands, *strategy.results)]
        return " ".join(
            (*lies, _join_axes(strategy.partial), _join_axes(strategy.summed_first), _join_axes(strategy.gathered))
        )

    def _sharding(self, lies: TensorSharding) -> str:
        found = self._shardings.get(lies)
        if found is None:
            found = self._shardings[lies] = str(lies)
        return found


def _join_axes(axes: Sequence[str]) -> str:
    return "·".join(axes) or "-"
