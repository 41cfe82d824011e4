"""What executors are told, as messages: pure functions of a command and the formation that runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardwright.proto.v1 import worker_pb2
from shardwright.protocol import wire
from shardwright.server.master import commands as do
from shardwright.server.master.executables import holders_of_snapshots, load_messages, peers_of
from shardwright.server.master.formation import Formation

#: A message, and the nodes whose executors get it; None: all.
Order = tuple[worker_pb2.ExecutorCommand, Collection[int] | None]


def orders_of(command: do.ToWorkers | do.AbortOnWorkers, formation: Formation) -> Iterator[Order]:
    match command:
        case do.LoadOnWorkers():
            for order in load_messages(command, formation):
                yield order.message, order.nodes
        case do.AbortOnWorkers():
            abort = worker_pb2.AbortStep(sequence=command.sequence, error=wire.error_to_proto(command.error))
            yield worker_pb2.ExecutorCommand(abort=abort), command.nodes
        case _:
            yield _message_to_all(command, formation), None


def _message_to_all(command: do.ToWorkers, formation: Formation) -> worker_pb2.ExecutorCommand:
    message = worker_pb2.ExecutorCommand(sequence=command.sequence)
    match command:
        case do.RunOnWorkers(step=step):
            message.run.step.CopyFrom(step.payload)
            if step.moved_bytes is not None:
                message.run.peers.extend(peers_of(formation))
            if step.snapshot is not None:
                message.run.peers.extend(holders_of_snapshots(formation))
        case do.OpenOnWorkers():
            message.open.session_id = command.session_id
            for key, error in command.refused:
                message.open.refused_datasets.add(key=key, error=wire.error_to_proto(error))
        case do.CloseOnWorkers():
            message.close.session_id = command.session_id
        case do.UnloadOnWorkers():
            unload = worker_pb2.UnloadProgram(session_id=command.session_id, executable_id=command.executable_id)
            message.unload.CopyFrom(unload)
        case do.WriteOnWorkers():
            write = worker_pb2.WriteCheckpoint(session_id=command.session_id, number=command.number)
            message.write_checkpoint.CopyFrom(write)
        case do.FinishOnWorkers():
            finish = worker_pb2.FinishCheckpoint(
                session_id=command.session_id, number=command.number, is_commit=command.is_commit
            )
            message.finish_checkpoint.CopyFrom(finish)
        case do.StoreOnWorkers():
            message.store_snapshot.CopyFrom(_snapshot_order(command, formation))
        case do.ReportOnWorkers():
            message.report.SetInParent()
        case do.ReleaseOnWorkers():
            release = worker_pb2.ReleaseWorkerArrays(session_id=command.session_id, array_ids=command.array_ids)
            if command.error is not None:
                release.error.CopyFrom(wire.error_to_proto(command.error))
            message.release.CopyFrom(release)
        case do.LoadOnWorkers():
            raise AssertionError("a program takes several messages")
    return message


def _snapshot_order(command: do.StoreOnWorkers, formation: Formation) -> worker_pb2.StoreSnapshot:
    return worker_pb2.StoreSnapshot(
        session_id=command.session_id,
        number=command.number,
        peers=peers_of(formation),
        order=worker_pb2.SnapshotOrder(
            generation=formation.generation,
            sequence=command.sequence,
            keep=command.keep or (),
            keeps_all=command.keep is None,
        ),
    )
