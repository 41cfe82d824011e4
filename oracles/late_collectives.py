"""Collectives that a pipeline's micro-batches run and one after the last of them would do, by XLA's text.

    python -m oracles.late_collectives [--models gpt2,mixed] [--meshes 4,2x2]

Plans every model of `workloads/pipeline_steps.py` in two stages, has XLA compile the programs of its micro-batches for
CPU devices, and follows the result of each collective there. Where that is added to sums over the micro-batches and
nothing else, or changed on the way by what is linear alone, the sum could be reduced instead, once: the collective is
*late*. Prints a line of JSON a pipeline, exit code 1 if there is one.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import shardwright as sw
from shardwright.hlo import Computation, Instruction, parse
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.xla.compiling import compile_planned
from workloads.pipeline_steps import MODELS

#: Programs that run once for every micro-batch.
KINDS = frozenset({"forward", "backward", "weight"})
_COLLECTIVES = frozenset({"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"})

#: The same done to each summand, or to their sum.
_LINEAR = frozenset(
    {"add", "all-gather", "all-reduce", "all-to-all", "bitcast", "collective-permute", "concatenate", "convert", "copy",
     "dynamic-slice", "negate", "reduce-scatter", "reshape", "slice", "subtract", "transpose", "tuple",
     "get-tuple-element"}
)  # fmt: skip
#: Linear in one operand, if the other one is the same for every micro-batch.
_SCALED = frozenset({"multiply", "divide"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCollective:
    """A collective of a micro-batch's program that could run once. bytes: of its result, on one device."""

    program: str
    kind: str
    instruction: str
    bytes: int


def find_late(plan: PipelinePlan) -> Iterator[LateCollective]:
    """The late collectives of all programs of a pipeline, as XLA compiles them."""
    for program in plan.programs:
        if program.kind in KINDS and program.plan.collectives:
            compiled = compile_planned(program.plan.require_hlo(), program.plan, want_executable=False)
            text = gzip.decompress(compiled.partitioned_gzip).decode()
            for instruction in find_late_in_text(text, reads=program.reads, writes=program.writes):
                name = instruction.op_name or instruction.name
                size = instruction.shape.size_bytes
                yield LateCollective(program=program.name, kind=instruction.opcode, instruction=name, bytes=size)


def find_late_in_text(text: str, *, reads: Sequence[str], writes: Sequence[str]) -> Iterator[Instruction]:
    """The late collectives of a micro-batch's partitioned program. reads, writes: see `PipelineProgram`."""
    entry = parse(text).entry
    sums = frozenset(number for number, value in enumerate(writes) if value in reads)
    users: dict[Instruction, list[Instruction]] = {}
    for instruction in entry:
        for operand in dict.fromkeys(instruction.operands):
            users.setdefault(operand, []).append(instruction)
    invariant = _find_invariant(entry, reads)
    for instruction in entry:
        if instruction.opcode not in _COLLECTIVES or instruction in invariant:
            continue
        if _only_adds_to_sums(instruction, entry, users, sums, invariant):
            yield instruction


def _find_invariant(entry: Computation, reads: Sequence[str]) -> frozenset[Instruction]:
    """What every micro-batch has alike: made of constants and of values of the step that no micro-batch changes."""
    fixed = {number for number, value in enumerate(reads) if value.startswith(("argument.", "ahead."))}
    invariant: set[Instruction] = set()
    for instruction in entry:
        if instruction.opcode == "parameter":
            if instruction.index in fixed:
                invariant.add(instruction)
        elif all(operand in invariant for operand in instruction.operands):
            invariant.add(instruction)
    return frozenset(invariant)


def _only_adds_to_sums(
    value: Instruction,
    entry: Computation,
    users: Mapping[Instruction, list[Instruction]],
    sums: frozenset[int],
    invariant: frozenset[Instruction],
) -> bool:
    """Whether a value reaches the program's results as a term of sums over the micro-batches alone."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        if value is entry.root:
            return False
        for user in users.get(value, ()):
            if user is entry.root:
                if any(operand is value and i not in sums for i, operand in enumerate(user.operands)):
                    return False
            elif user.opcode in _SCALED:
                if any(operand is not value and operand not in invariant for operand in user.operands):
                    return False
                todo.append(user)
            elif user.opcode not in _LINEAR:
                return False
            elif user not in seen:
                todo.append(user)
            seen.add(user)
    return True


def plan_model(model: str, mesh: Mapping[str, int], micro_batches: int = 4, stages: int = 2) -> PipelinePlan:
    """A pipeline of a model on CPU devices, stages of `mesh`."""
    text = MODELS[model]().lower().as_text("hlo", debug_info=True)
    plan = sw.plan(
        text, stages * prod(mesh.values()), cache=False, stages=stages, mesh=dict(mesh), micro_batches=micro_batches
    )
    assert isinstance(plan, PipelinePlan)
    return plan


def parse_mesh(text: str) -> dict[str, int]:
    return dict(zip(("data", "model"), map(int, text.split("x")), strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default="4,2x2")
    options = parser.parse_args()
    count = 0
    for model in options.models.split(","):
        for mesh in options.meshes.split(","):
            plan = plan_model(model, parse_mesh(mesh))
            late = list(find_late(plan))
            count += len(late)
            found = [f"{one.program}: {one.kind} {one.instruction}, {one.bytes} bytes" for one in late]
            print(json.dumps({"model": model, "mesh": mesh, "schedule": plan.schedule, "late": found}), flush=True)
    return count > 0


if __name__ == "__main__":
    sys.exit(main())
