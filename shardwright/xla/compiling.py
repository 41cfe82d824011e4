"""Emit, compile and inspect one program. Runs in a compile child: XLA may abort its process."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Mapping
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwright.errors import CompilationError
from shardwright.plans.plan import OptionValue, Plan
from shardwright.xla import private
from shardwright.xla.compiled import CompiledMemory, CompiledProgram, refusal
from shardwright.xla.emit import emit_stablehlo
from shardwright.xla.host_layouts import set_host_layouts
from shardwright.xla.inspect import find_collectives
from shardwright.xla.jax_shardings import require_shardings
from shardwright.xla.tuning import DUMP_POLL_S

#: Passes whose input or output is worth reading: the partitioner's result, and the program just before XLA:CPU merges
#: all its all-reduces into one (which GPU and TPU do not).
_DUMPED_PASSES = ".*spmd-partitioning|cpu-all-reduce-combiner"
_BEFORE_COMBINER = "*before_cpu-all-reduce-combiner*.txt"
_PARTITIONED = "*after_spmd-partitioning*.txt"
#: For devices that are not here: the same of XLA:GPU and the TPU compiler, ahead of the first of their combiners.
_DUMPED_PASSES_ELSEWHERE = ".*all-gather-combiner"
_BEFORE_COMBINER_ELSEWHERE = "*before_*all-gather-combiner*.txt"

#: Compiles what is read before XLA is through with it.
_BESIDE = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="xla")


def compile_planned(hlo_text: str, plan: Plan, *, want_executable: bool) -> CompiledProgram:
    """Emit and compile a plan for this process' devices.

    want_executable: also serialize XLA's executable. Raises CompilationError if XLA refuses the program or changed a
    sharding at its boundary.
    """
    started = time.perf_counter()
    stablehlo = emit_for_this_process(hlo_text, plan, with_stand_ins=not want_executable)
    emit_s = time.perf_counter() - started
    return replace(compile_emitted(stablehlo, plan, want_executable=want_executable), emit_s=emit_s)


def emit_for_this_process(hlo_text: str, plan: Plan, *, with_stand_ins: bool = False) -> str:
    """StableHLO of a plan for the devices that this process compiles for, which may be others than the plan's."""
    platform = private.devices_to_compile_for(1)[0].platform
    return emit_stablehlo(hlo_text, plan, with_stand_ins=with_stand_ins, platform=platform)


def compile_emitted(stablehlo: str, plan: Plan, *, want_executable: bool) -> CompiledProgram:
    """Compile the result of `emit_stablehlo`."""
    started = time.perf_counter()
    devices = private.devices_to_compile_for(plan.mesh.device_count)
    if len(devices) < plan.mesh.device_count:
        raise CompilationError(f"the mesh {plan.mesh} needs more than the {len(devices)} devices of the compiler")
    with tempfile.TemporaryDirectory(prefix="shardwright-xla-") as folder:
        executable = _compile(stablehlo, devices, folder, plan.compile_options, plan)
        compile_s = time.perf_counter() - started
        pattern = _BEFORE_COMBINER_ELSEWHERE if private.described else _BEFORE_COMBINER
        text = _newest(folder, pattern) or private.hlo_of_executable(executable)
    require_shardings(
        "argument", private.parameter_shardings(executable), [v.stored_sharding for v in plan.parameters], plan.mesh
    )
    require_shardings(
        "output", private.output_shardings(executable), [v.stored_sharding for v in plan.outputs], plan.mesh
    )
    arguments, outputs, alias, temporaries = private.memory_figures(executable)
    return CompiledProgram(
        stablehlo=stablehlo,
        partitioned_gzip=_compress(text),
        serialized=private.serialize_executable(executable) if want_executable else None,
        collectives=find_collectives(text, plan.mesh.device_count),
        memory=CompiledMemory(
            argument_bytes=arguments, output_bytes=outputs, alias_bytes=alias, temporary_bytes=temporaries
        ),
        emit_s=0.0,
        compile_s=compile_s,
    )


def inspect_partitioned(hlo_text: str, plan: Plan) -> CompiledProgram:
    """Read the collectives right after XLA's partitioner, minutes before a deep model is compiled.

    XLA goes on compiling in a thread of this process; see `wait_for_xla`.
    """
    started = time.perf_counter()
    stablehlo = emit_for_this_process(hlo_text, plan, with_stand_ins=True)
    emitted = time.perf_counter()
    text = partition_hlo(stablehlo, plan.mesh.device_count)
    return CompiledProgram(
        stablehlo=stablehlo,
        partitioned_gzip=_compress(text),
        serialized=None,
        collectives=find_collectives(text, plan.mesh.device_count),
        memory=None,
        emit_s=emitted - started,
        compile_s=time.perf_counter() - emitted,
    )


def partition_hlo(stablehlo: str, device_count: int) -> str:
    """HLO text of StableHLO with Shardy marks, after XLA's partitioner, while XLA goes on in a thread.

    On one device there is nothing to partition: the fully compiled program is read. Raises CompilationError if XLA
    refuses the program.
    """
    folder = tempfile.mkdtemp(prefix="shardwright-xla-")
    compilation = _BESIDE.submit(_compile, stablehlo, private.devices_to_compile_for(device_count), folder)
    try:
        return _partition_text(compilation, device_count, folder)
    finally:
        compilation.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))


def wait_for_xla() -> None:
    """Wait until XLA is through with what `partition_hlo` has read, or has refused it."""
    _BESIDE.submit(lambda: None).result()


def _partition_text(compilation: futures.Future[Any], device_count: int, folder: str) -> str:
    while not compilation.done():
        text = _newest(folder, _PARTITIONED)
        # The dump is written in one go; its last line closes the last computation.
        if text is not None and text.rstrip().endswith("}"):
            return text
        futures.wait([compilation], DUMP_POLL_S)
    executable = compilation.result()
    text = _newest(folder, _PARTITIONED)
    if text is None and device_count == 1:
        text = private.hlo_of_executable(executable)
    if text is None:
        raise CompilationError("XLA dumped no partitioned program", remedy="run `shardwright doctor`")
    return text


def _compile(
    stablehlo: str,
    devices: list[Any],
    folder: str,
    options: Mapping[str, OptionValue] = MappingProxyType({}),
    plan: Plan | None = None,
) -> Any:
    """XLA's executable, with the interesting passes dumped into `folder`. plan: the text's, where it has one."""
    build = private.compile_options(
        [device.id for device in devices],
        platform=devices[0].platform,
        overrides=[
            *options.items(),
            ("xla_dump_to", folder),
            (
                "xla_dump_hlo_pass_re",
                _DUMPED_PASSES_ELSEWHERE if private.described else _DUMPED_PASSES,
            ),
            ("xla_dump_large_constants", True),  # tables of slice offsets, one entry a device
        ],
    )
    if plan is not None and private.described:
        build = set_host_layouts(build, plan)
    try:
        return private.compile_for(stablehlo, devices, build)
    except Exception as error:
        raise refusal(error, options) from None


def compile_stablehlo(stablehlo: str, device_count: int) -> Any:
    """Compile unchanged StableHLO text, to inspect XLA's result."""
    with tempfile.TemporaryDirectory(prefix="shardwright-xla-") as folder:
        return _compile(stablehlo, private.devices_to_compile_for(device_count), folder)


def _compress(text: str) -> bytes:
    return gzip.compress(text.encode(), compresslevel=1)


def _newest(folder: str, pattern: str) -> str | None:
    """The text of the largest dumped module that matches: helpers of XLA's own are small."""
    paths = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
    return paths[-1].read_text() if paths else None
