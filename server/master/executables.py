"""From a plan to the executors' load messages: one program, or the programs and tasks of a pipeline."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shardwright.errors import CompilationError, add_place
from shardwright.plans.layouts import Layout
from shardwright.plans.pipeline_plan import ArgumentEntry, OutputEntry, PipelinePlan, PipelineProgram, PipelineStage
from shardwright.plans.plan import Plan, VariablePlan
from shardwright.plans.shardings import Mesh
from shardwright.proto.v1 import common_pb2, master_pb2, worker_pb2
from shardwright.protocol import plan_messages, wire
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.content_store import PlanRecord
from shardwright.server.master.formation import Formation
from shardwright.xla import Cancellation, CompileJob, CompileService
from shardwright.xla.compiled import CompiledProgram
from shardwright.xla.machine_code import machine_code_target

#: The nodes that own some of these devices.
NodesOf = Callable[[range], frozenset[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """A compiled program. nodes: those that run it."""

    compiled: CompiledProgram
    nodes: frozenset[int]

    def executable_for(self, formation: Formation) -> bytes | None:
        """XLA's executable, if all nodes that run it have this machine's code; None: they compile the text."""
        targets = {formation.nodes[node].machine_code for node in self.nodes}
        return self.compiled.serialized if targets == {machine_code_target()} else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The executors' load. binaries: by the program's name; "" in a single-program plan."""

    record: PlanRecord
    binaries: Mapping[str, Binary]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorMessage:
    """A message to executors. nodes: None means all of them."""

    message: worker_pb2.ExecutorCommand
    nodes: frozenset[int] | None = None


# ---- compiling -----------------------------------------------------------------
def compile_program(
    plan_id: str,
    record: PlanRecord,
    compiler: CompileService,
    nodes_of: NodesOf,
    cancellation: Cancellation | None = None,
) -> ev.ProgramInfo:
    """Blocking: emit and compile every program in the compile child. Raises what the compiler raises."""
    plan = record.plan_with_text()
    if isinstance(plan, PipelinePlan):
        stages = plan.stages
        return ev.ProgramInfo(
            plan_id=plan_id,
            argument_count=len(plan.arguments),
            donated=_find_aliased(plan),
            output_bytes=tuple(_entry_layout(entry, stages).size_bytes for entry in plan.outputs),
            stages=tuple(nodes_of(stage.devices) for stage in stages),
            predicted_s=plan.step_s,
            payload=Payload(record=record, binaries=_binaries_of(plan, compiler, nodes_of, cancellation)),
        )
    nodes = nodes_of(range(record.first_device, record.first_device + plan.mesh.device_count))
    try:
        compiled = compiler.compile(
            plan.require_hlo(), plan, want_executable=_can_be_sent(nodes, compiler), cancellation=cancellation
        )
    except CompilationError as error:  # of the compile child, on the master's machine
        raise add_place(error, "worker 0") from error
    return ev.ProgramInfo(
        plan_id=plan_id,
        argument_count=len(plan.parameters),
        donated=frozenset(variable.number for variable in plan.parameters if variable.alias is not None),
        output_bytes=tuple(Layout.of(variable, plan.mesh).size_bytes for variable in plan.outputs),
        predicted_s=plan.cost.step_s,
        payload=Payload(record=record, binaries={"": Binary(compiled=compiled, nodes=nodes)}),
    )


def _binaries_of(
    plan: PipelinePlan, compiler: CompileService, nodes_of: NodesOf, cancellation: Cancellation | None
) -> dict[str, Binary]:
    nodes = [nodes_of(plan.stages[program.stage].devices) for program in plan.programs]
    compiled = compiler.compile_all(
        [
            CompileJob(
                name=f"{program.name} of stage {program.stage}",
                hlo_text=program.plan.require_hlo(),
                plan=program.plan,
                want_executable=_can_be_sent(owners, compiler),
            )
            for program, owners in zip(plan.programs, nodes, strict=True)
        ],
        cancellation,
    )
    return {
        program.name: Binary(compiled=binary, nodes=owners)
        for program, binary, owners in zip(plan.programs, compiled, nodes, strict=True)
    }


def _can_be_sent(nodes: frozenset[int], compiler: CompileService) -> bool:
    """Whether the executable of the compile child, one process with all devices, runs on these nodes.

    XLA:GPU compiles programs of several processes in each of them.
    """
    return len(nodes) == 1 or compiler.platform == "cpu"


def _find_aliased(plan: PipelinePlan) -> frozenset[int]:
    """Positions of the arguments replaced by outputs."""
    return frozenset(entry.alias for entry in plan.outputs if entry.alias is not None)


def _entry_layout(entry: ArgumentEntry | OutputEntry, stages: tuple[PipelineStage, ...]) -> Layout:
    stage = stages[entry.stage]
    return Layout.of(entry.variable, stage.mesh, stage.first_device)


# ---- loading -------------------------------------------------------------------
def load_messages(command: do.LoadOnWorkers, formation: Formation) -> Iterator[ExecutorMessage]:
    """Every program to its nodes, then to all nodes the executable made of them."""
    payload: Payload = command.program.payload
    executable_id = command.program.plan_id
    executables = {name: binary.executable_for(formation) for name, binary in payload.binaries.items()}
    for name, binary in payload.binaries.items():
        chunk_id = f"{executable_id}/{name}" if name else executable_id
        executable = executables[name]
        for chunk in wire.chunks(binary.compiled.stablehlo.encode() if executable is None else executable):
            message = worker_pb2.ProgramChunk(executable_id=chunk_id, chunk=chunk, crc32=zlib.crc32(chunk))
            yield ExecutorMessage(message=worker_pb2.ExecutorCommand(chunk=message), nodes=binary.nodes)
    plan = payload.record.plan
    order = worker_pb2.ExecutorCommand(sequence=command.sequence)
    if isinstance(plan, PipelinePlan):
        order.load_pipeline.CopyFrom(_pipeline(plan, executables, formation))
        order.load_pipeline.session_id, order.load_pipeline.executable_id = command.session_id, executable_id
    else:
        order.load.CopyFrom(_program(plan, payload.record.first_device, executables[""]))
        order.load.session_id, order.load.executable_id = command.session_id, executable_id
    yield ExecutorMessage(message=order)


def _program(plan: Plan, first_device: int, executable: bytes | None) -> worker_pb2.LoadProgram:
    return worker_pb2.LoadProgram(
        is_serialized=executable is not None,
        arguments=_layouts(plan.parameters, plan.mesh, first_device),
        outputs=_layouts(plan.outputs, plan.mesh, first_device),
        donated=[variable.number for variable in plan.parameters if variable.alias is not None],
        mesh=wire.mesh_to_proto(plan.mesh),
        first_device=first_device,
        compile_options=wire.compile_options_to_proto(plan.compile_options),
    )


def _layouts(variables: tuple[VariablePlan, ...], mesh: Mesh, first_device: int) -> list[common_pb2.ArrayLayout]:
    return [wire.layout_to_proto(Layout.of(variable, mesh, first_device)) for variable in variables]


def _pipeline(
    plan: PipelinePlan, executables: Mapping[str, bytes | None], formation: Formation
) -> worker_pb2.LoadPipeline:
    stages = plan.stages
    return worker_pb2.LoadPipeline(
        programs=[
            _stage_program(part, stages[part.stage], is_serialized=executables[part.name] is not None)
            for part in plan.programs
        ],
        values=[
            worker_pb2.StageValue(
                name=value.name,
                stage=value.stage,
                layout=wire.layout_to_proto(
                    Layout.of(value.variable, stages[value.stage].mesh, stages[value.stage].first_device)
                ),
            )
            for value in plan.values
        ],
        arguments=[_stage_entry(entry, stages) for entry in plan.arguments],
        outputs=[_stage_entry(entry, stages) for entry in plan.outputs],
        donated=sorted(_find_aliased(plan)),
        tasks=gzip.compress(plan.tasks.to_json().encode(), compresslevel=1),
        peers=peers_of(formation),
        stages=[
            worker_pb2.StageDevices(first_device=stage.first_device, mesh=wire.mesh_to_proto(stage.mesh))
            for stage in stages
        ],
    )


def peers_of(formation: Formation) -> list[worker_pb2.Peer]:
    """Owner and transfer server of every device."""
    return [_peer(formation, node, devices) for node, devices in formation.devices.items()]


def holders_of_snapshots(formation: Formation) -> list[worker_pb2.Peer]:
    """The same, and the nodes that take no part, whose daemons may hold parts of a snapshot."""
    others = [node for node, record in formation.nodes.items() if node not in formation.team and record.daemon]
    return [*peers_of(formation), *(_peer(formation, node, range(0)) for node in others)]


def _peer(formation: Formation, node: int, devices: range) -> worker_pb2.Peer:
    record = formation.nodes[node]
    return worker_pb2.Peer(
        node=node,
        first_device=devices.start,
        device_count=len(devices),
        transfer_address=record.transfer_address,
        snapshot_address=record.snapshot_address,
        snapshot_key=record.snapshot_key,
    )


def _stage_entry(entry: ArgumentEntry | OutputEntry, stages: tuple[PipelineStage, ...]) -> worker_pb2.StageEntry:
    layout = wire.layout_to_proto(_entry_layout(entry, stages))
    return worker_pb2.StageEntry(value=entry.value, stage=entry.stage, layout=layout)


def _stage_program(program: PipelineProgram, stage: PipelineStage, *, is_serialized: bool) -> worker_pb2.StageProgram:
    plan = program.plan
    return worker_pb2.StageProgram(
        name=program.name,
        stage=program.stage,
        is_serialized=is_serialized,
        arguments=_layouts(plan.parameters, stage.mesh, stage.first_device),
        outputs=_layouts(plan.outputs, stage.mesh, stage.first_device),
        donated=[variable.number for variable in plan.parameters if variable.alias is not None],
    )


# ---- telling -------------------------------------------------------------------
def load_result(program: ev.ProgramInfo) -> master_pb2.LoadResult:
    """The client's view of a loaded plan."""
    payload: Payload = program.payload
    plan = payload.record.plan
    if not isinstance(plan, PipelinePlan):
        return plan_messages.load_result(program.plan_id, payload.binaries[""].compiled)
    result = master_pb2.LoadResult(executable_id=program.plan_id)
    for each in plan.programs:
        part = plan_messages.load_result("", payload.binaries[each.name].compiled)
        result.parts.add(name=each.name, stage=each.stage, result=part)
        result.compile_s += part.compile_s
    return result


def dump_texts(program: ev.ProgramInfo) -> Iterator[tuple[str, str, bytes]]:
    """(program, form, gzip-compressed text), in a `DumpPlanReply`'s terms."""
    payload: Payload = program.payload
    for name, binary in payload.binaries.items():
        yield name, "mlir", wire.compress_text(binary.compiled.stablehlo)
        yield name, "hlo", binary.compiled.partitioned_gzip
