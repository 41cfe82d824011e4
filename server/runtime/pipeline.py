"""This node's part of an executable of several stages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.proto.v1 import worker_pb2
from shardwright.protocol import wire
from shardwright.server.runtime.arrays import StoredArray, from_host, local_positions
from shardwright.server.runtime.cross_mesh_reshard import CrossMeshReshard
from shardwright.server.runtime.resharding import RowSection
from shardwright.server.runtime.tasks import Buffers, StageRecord, StageRunner, TaskRunner
from shardwright.server.runtime.transport import StopSignal, Transport
from shardwright.tasks import MICRO_BATCH, Buffer, Task, TaskGraph
from shardwright.xla.jax_shardings import mesh_devices
from shardwright.xla.runtime import BoundaryArray, LoadedProgram, load_program

#: Makes the transport of an executable, given, by device position, the address of its node's transfer server.
TransportTo = Callable[[Mapping[int, str]], Transport]

#: An argument or output of the step: its stage, its buffer there, and how it lies. None: on other nodes.
_Entry = tuple[int, Buffer, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineExecutable:
    """Loaded programs in the order of their tasks.

    arguments, outputs: those of the step, in order. donated: positions among the arguments whose buffers the step
    reuses.
    """

    runner: TaskRunner
    transport: Transport
    arguments: tuple[_Entry | None, ...]
    outputs: tuple[_Entry | None, ...]
    donated: frozenset[int]

    @property
    def arguments_here(self) -> tuple[bool, ...]:
        return tuple(entry is not None for entry in self.arguments)

    def run(
        self, sequence: int, stop: StopSignal, arrays: Sequence[StoredArray | None], records: Sequence[StageRecord] = ()
    ) -> list[StoredArray | None]:
        """Dispatch one step; per output its array, or None if it is elsewhere. `arrays`: likewise, per argument.

        Raises the error of the stage that failed first.
        """
        arguments: dict[int, Buffers] = {}
        for entry, array in zip(self.arguments, arrays, strict=True):
            if entry is not None and array is not None:
                stage, buffer, _ = entry
                arguments.setdefault(stage, {})[buffer] = array.value
        try:
            done = self.runner.run(sequence, stop, arguments, {record.stage: record for record in records})
        except Exception:
            self.transport.forget(sequence)
            raise
        return [
            None if entry is None else StoredArray(value=done[entry[0]][entry[1]], layout=entry[2])
            for entry in self.outputs
        ]

    def new_records(self) -> list[StageRecord]:
        return [StageRecord(stage=stage.stage) for stage in self.runner.stages]

    def markers(self, results: Sequence[StoredArray]) -> tuple[StoredArray, ...]:
        """All of them: they come from many programs."""
        return tuple(results)

    def place(self) -> str:
        return self.runner.place()

    def close(self) -> None:
        """End the threads of its stages."""
        self.runner.close()


def load_pipeline(
    message: worker_pb2.LoadPipeline, payload_of: Callable[[str], bytes], transport_to: TransportTo
) -> PipelineExecutable:
    """Load this node's programs of a pipeline and prepare its lists.

    payload_of: of a program, by its name.
    Raises what `load_program` raises, PlanError where a value cannot be handed over as it lies.
    """
    stages = [_Stage(wire.mesh_from_proto(stage.mesh), stage.first_device) for stage in message.stages]
    layouts = {(value.name, value.stage): wire.layout_from_proto(value.layout) for value in message.values}
    graph = TaskGraph.from_dict(json.loads(gzip.decompress(message.tasks)))
    programs = {
        program.name: _load(program, stages[program.stage], payload_of(program.name))
        for program in message.programs
        if stages[program.stage].is_here
    }
    nodes, addresses = locate_devices(message.peers)
    transport = transport_to(addresses)
    taken_over = {(message.arguments[number].value, message.arguments[number].stage) for number in message.donated}
    handovers = _CrossMeshReshards(layouts, nodes.__getitem__, transport, taken_over)
    runners = [
        StageRunner(number, graph.stages[number], programs, handovers.of(graph.stages[number]), stage.numbers(graph))
        for number, stage in enumerate(stages)
        if stage.is_here
    ]
    return PipelineExecutable(
        runner=TaskRunner(runners),
        transport=transport,
        arguments=_entries(message.arguments, stages),
        outputs=_entries(message.outputs, stages),
        donated=frozenset(message.donated),
    )


def locate_devices(peers: Iterable[worker_pb2.Peer]) -> tuple[dict[int, int], dict[int, str]]:
    """By device position, its node, and the address of that node's transfer server."""
    owners = {at: peer for peer in peers for at in _devices(peer.first_device, peer.device_count)}
    nodes = {at: peer.node for at, peer in owners.items()}
    return nodes, {at: peer.transfer_address for at, peer in owners.items()}


@dataclass(frozen=True, slots=True)
class _Stage:
    mesh: Mesh
    first_device: int

    @property
    def devices(self) -> range:
        return _devices(self.first_device, self.mesh.device_count)

    @property
    def is_here(self) -> bool:
        """Whether some of its devices are this node's."""
        return any(position in self.devices for position in local_positions())

    def numbers(self, graph: TaskGraph) -> Buffers:
        """The numbers of the micro-batches, on every device of the stage."""
        layout = Layout.replicated("s32", (), self.mesh, self.first_device)
        return {
            Buffer(MICRO_BATCH, number): from_host(np.int32(number).tobytes(), layout).value
            for number in range(graph.micro_batches)
        }


def _devices(first: int, count: int) -> range:
    return range(first, first + count)


def _load(program: worker_pb2.StageProgram, stage: _Stage, payload: bytes) -> LoadedProgram:
    return load_program(
        payload,
        is_serialized=program.is_serialized,
        mesh=stage.mesh,
        devices=mesh_devices()[stage.first_device :],
        arguments=[boundary_of(wire.layout_from_proto(layout)) for layout in program.arguments],
        outputs=[boundary_of(wire.layout_from_proto(layout)) for layout in program.outputs],
        donated=tuple(program.donated),
    )


def boundary_of(layout: Layout) -> BoundaryArray:
    """What a program is loaded with, of an argument or output."""
    return BoundaryArray(
        element_type=layout.element_type,
        shape=layout.shape,
        stored_shape=layout.stored_shape,
        sharding=layout.sharding,
        is_on_host=layout.is_on_host,
    )


class _CrossMeshReshards:
    """Moves of values between stages; one for all micro-batches of a value.

    donated: (value, stage) of the arguments whose buffers the step reuses.
    """

    def __init__(
        self,
        layouts: Mapping[tuple[str, int], Layout],
        node_of: Callable[[int], int],
        transport: Transport,
        donated: Set[tuple[str, int]],
    ) -> None:
        self._layouts = layouts
        self._donated = donated
        self._node_of = node_of
        self._transport = transport
        self._known: dict[tuple[str, int, int], CrossMeshReshard] = {}

    def of(self, tasks: Iterable[Task]) -> dict[int, CrossMeshReshard]:
        """By transfer number, of the sends and receives among the tasks of a stage."""
        reshards = {}
        for task in tasks:
            if task.transfer is not None and task.peer is not None:
                is_send = task.kind == "send"
                value = (task.reads if is_send else task.writes)[0].value
                ends = (task.stage, task.peer) if is_send else (task.peer, task.stage)
                reshards[task.transfer] = self._between(value, *ends)
        return reshards

    def _between(self, value: str, source: int, target: int) -> CrossMeshReshard:
        key = (value, source, target)
        if key not in self._known:
            self._known[key] = CrossMeshReshard(
                (RowSection(self._layouts[value, source]),),
                RowSection(self._layouts[value, target]),
                node_of=self._node_of,
                devices=local_positions(),
                transport=self._transport,
                is_donated=(value, source) in self._donated,
            )
        return self._known[key]


def _entries(entries: Iterable[worker_pb2.StageEntry], stages: Sequence[_Stage]) -> tuple[_Entry | None, ...]:
    return tuple(
        (entry.stage, Buffer(entry.value), wire.layout_from_proto(entry.layout))
        if stages[entry.stage].is_here
        else None
        for entry in entries
    )
