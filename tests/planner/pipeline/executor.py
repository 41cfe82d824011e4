"""Runs a PipelinePlan in this process: every stage on its own devices, tasks in the order of their lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardwright.plans.layouts import Layout, logical_part, pad_to_stored
from shardwright.plans.pipeline_plan import MICRO_BATCH, PipelinePlan, PipelineProgram
from shardwright.tasks import Buffer, Task
from shardwright.xla import (
    BoundaryArray,
    LoadedProgram,
    emit_stablehlo,
    jax_mesh,
    load_program,
    mesh_devices,
    to_named_sharding,
)


class Executor:
    """A plan loaded onto devices of this process."""

    def __init__(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self._devices = mesh_devices()
        self._meshes = [jax_mesh(s.mesh, [self._devices[d] for d in s.devices]) for s in plan.stages]
        self._programs = {program.name: self._load(program) for program in plan.programs}

    def _load(self, program: PipelineProgram) -> LoadedProgram:
        stage = self.plan.stages[program.stage]
        return load_program(
            emit_stablehlo(program.plan.require_hlo(), program.plan).encode(),
            is_serialized=False,
            mesh=stage.mesh,
            arguments=[BoundaryArray.of(v) for v in program.plan.parameters],
            outputs=[BoundaryArray.of(v) for v in program.plan.outputs],
            devices=[self._devices[d] for d in stage.devices],
            donated=[v.number for v in program.plan.parameters if v.alias is not None],
        )

    def step(self, arguments: Sequence[Any]) -> list[np.ndarray]:
        """One step on flat arguments as the user has them; its flat outputs."""
        stages = [_Stage(self, number) for number in range(len(self.plan.stages))]
        for entry in self.plan.arguments:
            array = np.asarray(arguments[entry.argument])
            array = array if entry.rows is None else array[slice(*entry.rows)]
            layout = Layout.of(entry.variable, self.plan.stages[entry.stage].mesh)
            stages[entry.stage].given[Buffer(entry.value)] = self.place(
                pad_to_stored(array, layout), entry.stage, layout
            )
        sent: dict[int, np.ndarray] = {}
        while sum(stage.advance(sent) for stage in stages):
            pass
        assert all(stage.is_done for stage in stages), "stages wait for each other"
        assert not any(stage.buffers for stage in stages), "buffers stay behind"
        parts: dict[int, list[np.ndarray]] = {}
        for output in self.plan.outputs:
            layout = Layout.of(output.variable, self.plan.stages[output.stage].mesh)
            array = np.asarray(stages[output.stage].left[Buffer(output.value)])
            parts.setdefault(output.output, []).append(logical_part(array, layout))
        return [
            parts[number][0] if len(parts[number]) == 1 else np.concatenate(parts[number]) for number in sorted(parts)
        ]

    def place(self, array: np.ndarray, stage: int, layout: Layout) -> jax.Array:
        return jax.device_put(array, to_named_sharding(self._meshes[stage], layout.sharding))

    def run(self, program: str, reads: list[jax.Array]) -> list[jax.Array]:
        return self._programs[program].run(reads)


class _Stage:
    def __init__(self, executor: Executor, number: int) -> None:
        self.executor = executor
        self.plan = executor.plan
        self.number = number
        self.tasks: Sequence[Task] = self.plan.tasks.stages[number]
        self.at = 0
        self.given: dict[Buffer, jax.Array] = {}
        self.left: dict[Buffer, jax.Array] = {}
        self.buffers: dict[Buffer, jax.Array] = {}
        self.coming: dict[Buffer, int] = {}

    @property
    def is_done(self) -> bool:
        return self.at == len(self.tasks)

    def advance(self, sent: dict[int, np.ndarray]) -> bool:
        """Do tasks until one waits for another stage; whether any was done. sent: by number of the transfer."""
        before = self.at
        while not self.is_done:
            task = self.tasks[self.at]
            if any(buffer in self.coming and self.coming[buffer] not in sent for buffer in task.reads):
                break
            for buffer in task.reads:
                if buffer in self.coming:
                    self.buffers[buffer] = self._arrived(sent.pop(self.coming.pop(buffer)), buffer)
            self._do(task, sent)
            for buffer in task.frees:
                del self.buffers[buffer]
            self.at += 1
        return self.at > before

    def _do(self, task: Task, sent: dict[int, np.ndarray]) -> None:
        if task.kind == "input":
            self.buffers.update({buffer: self.given[buffer] for buffer in task.writes})
        elif task.kind == "fetch":
            self.left.update({buffer: self.buffers[buffer] for buffer in task.reads})
        elif task.kind == "send":
            sent[task.transfer] = np.asarray(self.buffers[task.reads[0]])  # it may be donated before it arrives
        elif task.kind == "receive":
            self.coming[task.writes[0]] = task.transfer
        else:
            reads = [self._index(b) if b.value == MICRO_BATCH else self.buffers[b] for b in task.reads]
            self.buffers.update(zip(task.writes, self.executor.run(task.program, reads), strict=True))

    def _arrived(self, array: np.ndarray, buffer: Buffer) -> jax.Array:
        layout = Layout.of(self.plan.value[buffer.value, self.number].variable, self.plan.stages[self.number].mesh)
        return self.executor.place(array, self.number, layout)

    def _index(self, buffer: Buffer) -> jax.Array:
        layout = Layout.replicated("s32", (), self.plan.stages[self.number].mesh)
        return self.executor.place(np.int32(buffer.micro_batch), self.number, layout)
