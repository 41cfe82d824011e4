"""Final messages of an earlier search, saved to warm-start searches of nearly equal programs.

On each mesh message passing moves costs between decisions until the remaining unary and pairwise costs bound the plan
(`dual`). One more annotation leaves nearly all of these costs unchanged; other sizes leave them close. Balanced
segments verify it in one round; only changed parts are recomputed. Moving costs changes no assignment's sum: plans and
bounds are valid on the new problem under any start.

Decisions are identified by node numbers, annotations not counted, and states by their strategies: both are meaningful
in any program of the same outline. Repeats of a run share their entries.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.segments.segment_chain import Chain, Key
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.pbqp import IntArray
from shardwright.planner.solver.warm_start import VariableImage, WarmStart, translate
from shardwright.planner.strategies.expansion import Strategy
from shardwright.plans.shardings import TensorSharding
from shardwright.reserved_names import IDENTITY_TARGETS


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDecision:
    """One decision, shared by all repeats of a run.

    repeats: number of repeats.
    labels: of its states.
    """

    repeats: int
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedMessages:
    """Final messages of the search on one mesh.

    decisions: by number.
    numbers: (node counted without annotations, leaf) → decision number.
    warm_start: messages and states by decision number.
    lower_bound_s: bound over plans with tied repeats, seconds.
    """

    decisions: tuple[SavedDecision, ...]
    numbers: Mapping[Variable, int]
    warm_start: WarmStart[int]
    lower_bound_s: float

    @classmethod
    def of(cls, chain: Chain, start: WarmStart[Key], least_s: float) -> SavedMessages:
        """From a chain and its final message-passing state."""
        keys = sorted({key for pair in start.moved for key in pair}.union(start.states))
        number_of = {key: number for number, key in enumerate(keys)}
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
                SavedDecision(repeats=chain.repeats(key), labels=labels.labels_of(chain, key)) for key in keys
            ),
            numbers=numbers,
            warm_start=translate(start, places, {key: chain.repeats(key) for key in keys}),
            lower_bound_s=least_s,
        )

    def to_warm_start(self, chain: Chain) -> WarmStart[Key]:
        """A warm start of another chain, covering its known decisions."""
        nodes, labels = number_nodes(chain.graph.flow), _StateLabels()
        states_by_key, counts = chain.states(), Counter[tuple[int, Key]]()
        for segment, instance in enumerate(chain.instances):
            for position, (node, leaf) in enumerate(instance.variables[: instance.own_count]):
                number, key = self.numbers.get((nodes.get(node, -1), leaf)), chain.key(segment, position)
                if number is not None and key in states_by_key:
                    counts[number, key] += 1
        places: dict[int, list[VariableImage[Key]]] = {}
        for (number, key), count in counts.items():
            states = labels.match(self.decisions[number].labels, labels.labels_of(chain, key))
            places.setdefault(number, []).append(VariableImage(key, states, count))
        return translate(
            self.warm_start, places, {number: decision.repeats for number, decision in enumerate(self.decisions)}
        )

    def encode(self) -> bytes:
        """Serialized bytes, the input of `decode`."""
        texts: dict[str, int] = {}
        said = {
            "decisions": [
                [decision.repeats, [texts.setdefault(label, len(texts)) for label in decision.labels]]
                for decision in self.decisions
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
        """Raises ValueError, TypeError, KeyError or IndexError on data not written by `encode`."""
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
    """Hash of the opcodes of a program's nodes, in message numbering order."""
    return sha256(" ".join(flow.nodes[node].instruction.opcode for node in number_nodes(flow)).encode()).digest()


def number_nodes(flow: Dataflow) -> dict[int, int]:
    """Numbers of all nodes except annotations."""
    node_indices = (n.index for n in flow.nodes if n.instruction.get("custom_call_target") not in IDENTITY_TARGETS)
    return {node: number for number, node in enumerate(node_indices)}


class _StateLabels:
    """Text labels of strategies; equal sets are labeled once."""

    def __init__(self) -> None:
        self._shardings: dict[TensorSharding, str] = {}
        self._sets: dict[int, tuple[str, ...]] = {}
        self._places: dict[tuple[tuple[str, ...], int], IntArray] = {}

    def labels_of(self, chain: Chain, key: Key) -> tuple[str, ...]:
        """Labels of a decision's states."""
        strategies = chain.graph.set_of(chain.variable(key)).strategies
        labels = self._sets.get(id(strategies))
        if labels is None:
            labels = self._sets[id(strategies)] = tuple(map(self._label, strategies))
        return labels

    def match(self, old_labels: tuple[str, ...], new_labels: tuple[str, ...]) -> IntArray:
        """Index of each of `new_labels` (from `labels_of`) among the old labels; -1 when absent."""
        positions = self._places.get((old_labels, id(new_labels)))
        if positions is None:
            place = {label: i for i, label in enumerate(old_labels)}
            positions = self._places[old_labels, id(new_labels)] = np.array(
                [place.get(label, -1) for label in new_labels], np.int64
            )
        return positions

    def _label(self, strategy: Strategy) -> str:
        """Size-independent label of a strategy, unique within its instruction."""
        shardings = [self._sharding(sharding) for sharding in (*strategy.operands, *strategy.results)]
        return " ".join(
            (*shardings, _join_axes(strategy.partial), _join_axes(strategy.summed_first), _join_axes(strategy.gathered))
        )

    def _sharding(self, sharding: TensorSharding) -> str:
        text = self._shardings.get(sharding)
        if text is None:
            text = self._shardings[sharding] = str(sharding)
        return text


def _join_axes(axes: Sequence[str]) -> str:
    return "·".join(axes) or "-"
