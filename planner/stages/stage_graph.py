"""The stage graph: coarse parts of a training step, their costs, and the values between them.

A node is a part of the forward pass with its backward pass, its variables and their update: these stay together.
Forward values only go to higher node numbers; no other order is assumed.

Units: seconds and bytes on one device, one micro-batch; state and updates once a step. Bytes of a value are those
of the whole value, sent from one group of devices to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.errors import InternalError

#: Bytes on one device, by kind of device group; one for all kinds where there is but one.
ByKind = tuple[float, ...]

#: Which way a value goes through the pipeline: no later stage makes a `forward` value for an earlier one, no earlier
#: stage a `backward` one for a later one.
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """The cost of one node on one kind of device group.

    forward_s, backward_s: seconds a micro-batch.
    weight_s: the part of backward_s awaited by no other node: gradients of variables.
    update_s: seconds once a step (optimizer, reduction of gradients).
    arrival_s: seconds once a step, until the client's data arrive.
    state_bytes: variables, optimizer state and gradient accumulators.
    saved_bytes: bytes kept from the forward to the backward pass, inside the node.
    delayed_bytes: bytes kept until the `weight_s` part, if deferred.
    workspace_bytes: peak of other live bytes during the node.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    update_s: float = 0.0
    arrival_s: float = 0.0
    state_bytes: float = 0.0
    saved_bytes: float = 0.0
    delayed_bytes: float = 0.0
    workspace_bytes: float = 0.0

    def seconds(self, micro_batches: int) -> float:
        """Seconds of one micro-batch, with its share of the update."""
        return self.forward_s + self.backward_s + self.update_s / micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNode:
    """costs: one per kind of device group, by `StageSlot.kind`."""

    name: str
    costs: tuple[NodeCost, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageValue:
    """A value of one node, read by others: sent once to each other stage with a reader.

    bytes: of the whole value.
    producer: its node.
    readers: nodes with a reader in the pass of the same direction.
    saved_by: nodes with a backward reader of this forward value; their stages keep it in between.
    shard_bytes: bytes kept on one device, margin of memory predictions included.
    sent_bytes: bytes sent by one device.
    direction: forward or backward.
    """

    bytes: float
    producer: int
    readers: tuple[int, ...]
    saved_by: tuple[int, ...] = ()
    shard_bytes: ByKind = (0.0,)
    sent_bytes: ByKind = (0.0,)
    direction: Direction = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """A variable of several nodes, stored at `owner`; other stages receive it, and send its gradient, once a step.

    shard_bytes: of the copy and its gradient on one device of another stage, not the owner's.
    """

    bytes: float
    owner: int
    readers: tuple[int, ...]
    shard_bytes: ByKind = (0.0,)


def of_kind(sizes: ByKind, kind: int) -> float:
    """Bytes on a device of one kind of group."""
    return sizes[kind] if len(sizes) > 1 else sizes[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    nodes: tuple[StageNode, ...]
    values: tuple[StageValue, ...] = ()
    shared: tuple[SharedState, ...] = ()

    def __post_init__(self) -> None:
        for value in self.values:
            for reader in value.readers:
                if (reader > value.producer) != (value.direction == "forward"):
                    raise InternalError(f"a {value.direction} value goes from node {value.producer} to {reader}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSlot:
    """One stage of the pipeline to be filled.

    kind: of its device group.
    memory_bytes: memory of a device.
    in_flight: micro-batches with saved values, per moment to check (rows) and chunk of the stage (columns).
    delayed: micro-batches with deferred gradients of variables at once.
    """

    kind: int = 0
    memory_bytes: float = float("inf")
    in_flight: tuple[tuple[int, ...], ...] = ((1,),)
    delayed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """A cut of a stage graph.

    chunk_of: chunk per node; chunk c runs on stage c % stages.
    crossing_bytes: sent between stages, a micro-batch.
    chunk_s: seconds of each chunk, a micro-batch.
    memory_bytes: of one device of each stage.
    is_optimal: whether no cut within the limits sends less.
    """

    chunk_of: tuple[int, ...]
    crossing_bytes: float
    chunk_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    is_optimal: bool = True

    @property
    def imbalance(self) -> float:
        """Excess of the slowest chunk's time over the average, relative to the average."""
        return max(self.chunk_s) / (sum(self.chunk_s) / len(self.chunk_s)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CutProblem:
    """A stage graph, its stage slots, `chunks` of the model on each, and micro-batches a step."""

    graph: StageGraph
    stage_slots: tuple[StageSlot, ...]
    chunks: int
    micro_batches: int

    @property
    def chunk_count(self) -> int:
        return len(self.stage_slots) * self.chunks

    def stage_slot(self, chunk: int) -> StageSlot:
        return self.stage_slots[chunk % len(self.stage_slots)]

    def node_cost(self, node: int, chunk: int) -> NodeCost:
        """The cost of a node in a chunk."""
        return self.graph.nodes[node].costs[self.stage_slot(chunk).kind]

    def resident_bytes(self, node: int, stage: int) -> float:
        """Bytes of a node resident on one device of a stage."""
        place = self.stage_slots[stage]
        work = self.graph.nodes[node].costs[place.kind]
        return work.state_bytes + place.delayed * work.delayed_bytes

    @property
    def average_s(self) -> float:
        """Seconds of a chunk under perfect balance, on the average kind of group."""
        chunks = range(self.chunk_count)
        total = sum(
            self.node_cost(n, c).seconds(self.micro_batches) for n in range(len(self.graph.nodes)) for c in chunks
        )
        return total / self.chunk_count**2

    def to_cut(self, chunk_of: Sequence[int], *, is_optimal: bool = True) -> StageCut:
        """The cut with its costs."""
        chunk_s = [0.0] * self.chunk_count
        for node, chunk in enumerate(chunk_of):
            chunk_s[chunk] += self.node_cost(node, chunk).seconds(self.micro_batches)
        return StageCut(
            chunk_of=tuple(chunk_of),
            crossing_bytes=self._crossing_bytes(chunk_of),
            chunk_s=tuple(chunk_s),
            memory_bytes=tuple(self._memory_bytes(chunk_of, stage) for stage in range(len(self.stage_slots))),
            is_optimal=is_optimal,
        )

    def fits(self, cut: StageCut) -> bool:
        return all(used <= place.memory_bytes for used, place in zip(cut.memory_bytes, self.stage_slots, strict=True))

    def _crossing_bytes(self, chunk_of: Sequence[int]) -> float:
        stages = len(self.stage_slots)

        def sends(producer: int, readers: Sequence[int]) -> int:
            return len({chunk_of[reader] % stages for reader in readers} - {chunk_of[producer] % stages})

        values = sum(v.bytes * sends(v.producer, (*v.readers, *v.saved_by)) for v in self.graph.values)
        shared = sum(state_transfer_bytes(s, self.micro_batches) * sends(s.owner, s.readers) for s in self.graph.shared)
        return values + shared

    def _memory_bytes(self, chunk_of: Sequence[int], stage: int) -> float:
        graph, stages, kind = self.graph, len(self.stage_slots), self.stage_slots[stage].kind
        mine = [node for node, chunk in enumerate(chunk_of) if chunk % stages == stage]
        works = {node: self.node_cost(node, stage) for node in mine}
        saved = [0.0] * self.chunks
        for node, work in works.items():
            saved[chunk_of[node] // stages] += work.saved_bytes
        for value in graph.values:
            for chunk in {chunk_of[node] for node in value.saved_by if node in works}:
                saved[chunk // stages] += of_kind(value.shard_bytes, kind)
        elsewhere = [s for s in graph.shared if s.owner not in works and any(reader in works for reader in s.readers)]
        copies = sum(of_kind(s.shard_bytes, kind) for s in elsewhere)
        saved_bytes = max(
            sum(count * size for count, size in zip(moment, saved, strict=True))
            for moment in self.stage_slots[stage].in_flight
        )
        state = sum(self.resident_bytes(node, stage) for node in mine)
        return state + copies + saved_bytes + max((work.workspace_bytes for work in works.values()), default=0.0)


def state_transfer_bytes(shared: SharedState, micro_batches: int) -> float:
    """Bytes sent by one more stage reading a shared variable, both ways, a micro-batch."""
    return 2 * shared.bytes / micro_batches
