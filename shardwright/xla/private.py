"""The only module that touches undocumented names of jax and jaxlib, `private_devices` for other devices aside.

Each function wraps one use of a private name. `tests/xla/test_private.py` pins every one of them; `check_platform`
looks all of them up: a jaxlib that moved one gives one clear error before anything runs.

Written against jax/jaxlib 0.10.2; 0.11.2 and 0.12.0 have them all.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import gcd
from typing import Any

from shardwright.errors import CompilationError, HloSyntaxError, PlatformError, UnsupportedProgramError
from shardwright.xla.tuning import SHUTDOWN_PATIENCE_S

#: module → names that the functions below take from it; `Class.method` for methods.
PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "jax._src.array": ("ArrayImpl",),
    "jax._src.config": ("trace_context",),
    "jax._src.core": ("ShapedArray._getitem", "ShapedArray._iter", "pytype_aval_mappings"),
    "jax._src.dispatch": ("runtime_tokens.set_output_runtime_token",),
    "jax._src.distributed": ("global_state",),
    "jax._src.xla_bridge": ("backends_are_initialized",),
    "jax._src.dtypes": ("register_canonicalize_value_handler",),
    "jax._src.interpreters.mlir": ("get_constant_handler", "register_constant_handler"),
    "jax._src.interpreters.pxla": ("batched_device_put", "shard_arg_handlers", "shard_args"),
    "jax._src.lax.lax": ("_convert_element_type",),
    "jax._src.random.prng": ("PRNGKeyArray",),
    "jax._src.tree_util": ("dispatch_registry.register_node",),
    "jax._src.pjit": tuple(
        f"PjitInfo.{name}" for name in ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    ),
    "jaxlib._hlo": (
        "hlo_module_from_text",
        "HloModule.to_string",
        "HloModule.as_serialized_hlo_module_proto",
        "HloPrintOptions.short_parsable",
        "XlaComputation.get_hlo_module",
        "HloSharding.from_proto",
        "HloSharding.tile_assignment_devices",
        "HloSharding.tile_assignment_dimensions",
    ),
    "jaxlib._jax": (
        "Client.compile_and_load",
        "Client.deserialize_executable",
        "Client.serialize_executable",
        "CompileOptions.env_option_overrides",
        "CompileOptions.ParseFromString",
        "CompileOptions.SerializeAsString",
        "DeviceAssignment.create",
        "DeviceList",
        "DistributedRuntimeClient.key_value_dir_get",
        "DistributedRuntimeClient.key_value_set",
        "ExecutableBuildOptions.use_shardy_partitioner",
        "ExecuteResults.consume_with_handlers",
        "LoadedExecutable.execute_sharded",
        "LoadedExecutable.get_compiled_memory_stats",
        "LoadedExecutable.get_output_shardings",
        "LoadedExecutable.get_parameter_shardings",
        "LoadedExecutable.hlo_modules",
        "array_result_handler",
        "get_distributed_runtime_service",
        "mlir",
    ),
    "jaxlib._jax.mlir": ("mlir_module_to_xla_computation", "xla_computation_to_mlir_module"),
    "jaxlib.xla_client": (
        "Shape.array_shape",
        "Shape.to_serialized_proto",
        "make_cpu_client",
        "initialize_pjrt_plugin",
        "load_pjrt_plugin_dynamically",
        "make_c_api_device_topology",
        "register_custom_call_as_batch_partitionable",
        "register_custom_call_handler",
        "register_custom_call_target",
        "register_custom_type",
        "register_custom_type_handler",
    ),
    "jaxlib.cpu._lapack": ("initialize",),
    "jaxlib.lapack": ("batch_partitionable_targets", "registrations"),
    "jaxlib.mlir.ir": ("Context", "DialectRegistry", "Module", "Operation", "InsertionPoint", "NameLoc.name_str"),
    "jaxlib.mlir.dialects.sdy": ("ShardingConstraintOp", "register_dialect"),
    "jaxlib.mlir.dialects.mhlo": ("register_mhlo_dialect",),
    "jaxlib.mlir.dialects.chlo": ("register_dialect",),
    "jaxlib.mlir.dialects.stablehlo": ("register_dialect", "SliceOp", "PadOp", "ConvDimensionNumbers"),
    "jaxlib.mlir._mlir_libs._jax_mlir_ext": ("register_dialects",),
}

#: Passes that XLA:CPU leaves out. The first drops optimization barriers, and XLA:CPU runs it before it merges
#: equal instructions: what `jax.checkpoint`, or a plan, computes again to save memory would be kept after all (until
#: jaxlib 0.12).
#: XLA:GPU runs it after that, and refuses programs with barriers where it is left out.
DISABLED_PASSES = ("cse_barrier_expander",)

_DISABLE_PASSES_FLAG = "xla_disable_hlo_passes"


@cache
def _module(name: str) -> Any:
    if name == "jaxlib._jax.mlir":  # a submodule of an extension: an attribute, not importable
        return _module("jaxlib._jax").mlir
    return importlib.import_module(name)


def check_platform(private_names: Mapping[str, Sequence[str]] = PRIVATE_NAMES) -> None:
    """Look up every private name that Shardwright needs.

    private_names: names by their module.

    Raises PlatformError naming the names missing in the installed jaxlib.
    """
    missing = []
    for module, names in private_names.items():
        try:
            loaded = _module(module)
        except (ImportError, AttributeError):
            missing.append(module)
            continue
        missing += [f"{module}.{name}" for name in names if not _has(loaded, name)]
    if missing:
        raise PlatformError(
            f"jax {_version('jax')} with jaxlib {_version('jaxlib')} lacks {', '.join(missing)}",
            remedy="install the versions that pyproject.toml names: pip install 'jax==0.10.2' 'jaxlib==0.10.2'",
        )


def _has(owner: Any, name: str) -> bool:
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner is not None


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


# ---- functions -----------------------------------------------------------
def jit_marks(fn: Any) -> Any:
    """The `static_argnums`, `static_argnames`, `donate_argnums` and `donate_argnames` of a `jax.jit`, in attributes.

    Also of a Flax NNX `jit`. None for anything else.
    """
    return getattr(getattr(fn, "jitted_fn", fn), "_jit_info", None)


class _Waiter:
    """What JAX keeps of a computation with effects."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.block_until_ready = wait


def wait_at_barrier(key: object, wait: Callable[[], None]) -> None:
    """Has this thread's next `jax.effects_barrier()` call `wait`, once a key."""
    _module("jax._src.dispatch").runtime_tokens.set_output_runtime_token(key, _Waiter(wait))


# ---- HLO text ------------------------------------------------------------
def parse_hlo(text: str) -> Any:
    """XLA's own `HloModule` of HLO text; HloSyntaxError with XLA's message if it refuses."""
    try:
        return _module("jaxlib._hlo").hlo_module_from_text(text)
    except Exception as error:  # XlaRuntimeError or RuntimeError, by version
        raise HloSyntaxError(f"XLA's parser refuses the HLO text: {error}") from None


def canonical_hlo(text: str) -> str:
    """HLO text printed by XLA after parsing: the referee of our parser and printer."""
    return str(parse_hlo(text).to_string())


def hlo_of_proto(serialized: bytes) -> str:
    """HLO text of a serialized HloModuleProto, with all constants and metadata; HloSyntaxError if XLA refuses it."""
    hlo = _module("jaxlib._hlo")
    try:
        return _print_module(hlo.XlaComputation(serialized))
    except Exception as error:
        raise HloSyntaxError(str(error)) from None


def hlo_of_stablehlo(module: bytes) -> str:
    """HLO text of StableHLO in text or bytecode, likewise."""
    convert = _module("jaxlib._jax.mlir").mlir_module_to_xla_computation
    try:
        return _print_module(convert(module, use_tuple_args=False))
    except Exception as error:
        raise HloSyntaxError(str(error)) from None


def _print_module(computation: Any) -> str:
    options = _module("jaxlib._hlo").HloPrintOptions.short_parsable()
    options.print_metadata = True
    return str(computation.get_hlo_module().to_string(options))


#: An instruction's `metadata={…}`; strings inside may hold braces.
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')


def stablehlo_of(hlo_text: str) -> str:
    """StableHLO text of HLO text; every operation's location is its HLO instruction's name.

    Metadata is left out: XLA would make an `op_name` in it the location.
    """
    bare = _METADATA.sub("", hlo_text)
    computation = _module("jaxlib._hlo").XlaComputation(parse_hlo(bare).as_serialized_hlo_module_proto())
    try:
        converted = _module("jaxlib._jax.mlir").xla_computation_to_mlir_module(computation)
    except Exception as error:
        raise CompilationError(f"XLA cannot turn the HLO into StableHLO: {error}") from None
    return converted if isinstance(converted, str) else str(converted)


# ---- MLIR ----------------------------------------------------------------
def ir() -> Any:
    """`jaxlib.mlir.ir`."""
    return _module("jaxlib.mlir.ir")


def dialect(name: str) -> Any:
    """A dialect module of jaxlib, by its name: `sdy`, `stablehlo`, `mhlo` or `chlo`."""
    return _module(f"jaxlib.mlir.dialects.{name}")


@contextmanager
def mlir_context() -> Iterator[Any]:
    """A fresh MLIR context with every dialect that converted HLO may contain."""
    context = ir().Context()
    registry = ir().DialectRegistry()
    _module("jaxlib.mlir._mlir_libs._jax_mlir_ext").register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    dialect("sdy").register_dialect(context)
    dialect("mhlo").register_mhlo_dialect(context)
    dialect("chlo").register_dialect(context)
    dialect("stablehlo").register_dialect(context)
    with context, ir().Location.unknown(context):
        yield context


def parse_module(stablehlo: str) -> Any:
    """An `ir.Module` of converted HLO, in the current context.

    Raises UnsupportedProgramError if the HLO has an instruction missing in StableHLO.
    """
    try:
        return ir().Module.parse(stablehlo)
    except Exception as error:
        raise UnsupportedProgramError(f"an instruction of the program has no StableHLO form: {error}") from None


def verify(module: Any) -> None:
    """MLIR's own checks of a module; UnsupportedProgramError if a converted program fails them."""
    try:
        module.operation.verify()
    except Exception as error:
        raise UnsupportedProgramError(
            f"the program is not valid StableHLO: {error}",
            remedy="hand over a single-device program: no collectives, none that XLA has partitioned before",
        ) from None


def location_name(location: Any) -> str | None:
    """The HLO instruction name in a location, or None."""
    return location.name_str if isinstance(location, ir().NameLoc) else None


# ---- compiling and loading -------------------------------------------------
def compile_options(
    device_ids: Sequence[int], *, platform: str = "cpu", overrides: Sequence[tuple[str, Any]] = ()
) -> Any:
    """Options that partition a module with Shardy over the devices, in mesh order.

    platform: of the devices, in JAX's spelling. overrides: XLA debug options in the form (name, value), e.g.
    `("xla_dump_to", "/tmp/d")`; passes to switch off are added to `DISABLED_PASSES` of the CPU.
    """
    import numpy as np

    client = _module("jaxlib._jax")
    options = client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(device_ids)
    build = options.executable_build_options
    build.num_replicas = 1
    build.num_partitions = len(device_ids)
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    build.allow_spmd_sharding_propagation_to_parameters = [True]
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = client.DeviceAssignment.create(np.asarray([list(device_ids)], dtype=np.int32))
    named = dict(overrides)
    left_out = DISABLED_PASSES if platform == "cpu" else ()
    off = ",".join(filter(None, (*left_out, named.pop(_DISABLE_PASSES_FLAG, ""))))
    options.env_option_overrides = [*named.items(), (_DISABLE_PASSES_FLAG, off)]
    return options


def serialized_shape(dtype: Any, dimensions: Sequence[int]) -> bytes:
    """XLA's ShapeProto of an array in row-major order."""
    order = tuple(reversed(range(len(dimensions))))
    shape = _module("jaxlib.xla_client").Shape.array_shape(dtype, tuple(dimensions), order)
    return bytes(shape.to_serialized_proto())


def device_list(devices: Sequence[Any]) -> Any:
    return _module("jaxlib._jax").DeviceList(tuple(devices))


def compile_and_load(stablehlo: str, devices: Sequence[Any], options: Any) -> Any:
    """XLA's loaded executable of a StableHLO module; XLA's own exception if it refuses."""
    return local_client().compile_and_load(stablehlo, device_list(devices), options)


#: The client that `open_cpu_client` has made, if any.
_cpu_clients: list[Any] = []


def open_cpu_client() -> None:
    """Make the CPU this process' platform, without jax: a start that takes a quarter of the time.

    The number of devices is that of `XLA_FLAGS`. LAPACK's functions are registered as jax registers them: known to the
    compiler, and partitionable along their batch dimensions. Not for a process that imports jax, too.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as jax has it: no lines about each device
    xla_client, lapack = _module("jaxlib.xla_client"), _module("jaxlib.lapack")
    for platform, targets in lapack.registrations().items():
        for name, function, version in targets:
            xla_client.register_custom_call_target(name, function, platform=platform, api_version=version)
    for name in lapack.batch_partitionable_targets():
        xla_client.register_custom_call_as_batch_partitionable(name)
    _cpu_clients.append(xla_client.make_cpu_client())


def local_devices() -> list[Any]:
    """This process' devices, by id."""
    return sorted(local_client().local_devices(), key=lambda device: device.id)


#: Descriptions of devices that this process compiles for in place of its own, by `compile_for_described`.
described: list[Any] = []


def compile_for_described(devices: Sequence[Any]) -> None:
    """Have this process compile for descriptions of devices, and never for its own."""
    described[:] = devices


def devices_to_compile_for(count: int) -> list[Any]:
    """`count` devices in mesh order: those of `compile_for_described`, this process' own, or, of a job of more GPUs,
    descriptions of equal ones; fewer where it has fewer."""
    if described:
        return described[:count]
    devices = local_devices()
    if count <= len(devices) or devices[0].platform != "gpu":
        return devices[:count]
    from jax.experimental import topologies

    per_node = gcd(count, len(devices))
    shape = f"1x{count // per_node}x{per_node}"
    return list(topologies.get_topology_desc("described", "cuda", topology=shape).devices)


def compile_for(stablehlo: str, devices: Sequence[Any], options: Any) -> Any:
    """XLA's executable of a StableHLO module for `devices_to_compile_for`; not loaded where they are descriptions."""
    if not described and devices[0] in local_devices():
        return compile_and_load(stablehlo, devices, options)
    with mlir_context():
        return devices[0].client.compile(parse_module(stablehlo), device_list(devices), options)


def local_client() -> Any:
    """The PJRT client of this process' default backend."""
    if _cpu_clients:
        return _cpu_clients[-1]
    import jax

    return jax.local_devices()[0].client


def serialize_executable(executable: Any) -> bytes:
    return bytes(local_client().serialize_executable(executable))


def deserialize_executable(payload: bytes, devices: Sequence[Any], options: Any) -> Any:
    return local_client().deserialize_executable(payload, device_list(devices), options)


def hlo_of_executable(executable: Any) -> str:
    """HLO text of each device's program, collectives included."""
    return str(executable.hlo_modules()[0].to_string())


_LAPACK_CALL = 'custom_call_target="lapack_'


def prepare_custom_calls(compiled_text: str) -> None:
    """Prepare XLA:CPU for the custom calls of a program before it runs.

    LAPACK's functions are null pointers in a process that has lowered no such call: running one ends it.
    """
    if _LAPACK_CALL in compiled_text:
        _module("jaxlib.cpu._lapack").initialize()


_ALIAS_ENTRY = re.compile(r"\{[0-9, ]*\}: \((\d+), \{[0-9, ]*\}, (?:may|must)-alias\)")


def find_aliased_parameters(compiled_text: str) -> set[int]:
    """Numbers of the arguments whose buffers become outputs, from `hlo_of_executable`."""
    header = compiled_text.split("\n", 1)[0]
    return {int(number) for number in _ALIAS_ENTRY.findall(header)}


def parameter_shardings(executable: Any) -> list[Any]:
    """`OpSharding` of every argument of a loaded executable."""
    return list(executable.get_parameter_shardings() or [])


def output_shardings(executable: Any) -> list[Any]:
    """`OpSharding` of every output of a loaded executable."""
    return list(executable.get_output_shardings() or [])


def tile_coordinates(op_sharding: Any, rank: int, device_count: int) -> tuple[tuple[int, ...], ...]:
    """Per device, in mesh order, the number of its shard along each of `rank` dimensions."""
    sharding = _module("jaxlib._hlo").HloSharding.from_proto(op_sharding)
    if sharding.is_replicated() or device_count == 1:
        return ((0,) * rank,) * device_count
    if not sharding.is_tiled():
        return ((-1,) * (rank + 1),) * device_count  # on one device, manual, …: like no plan's
    sizes = sharding.tile_assignment_dimensions()
    shard_of_device: list[tuple[int, ...]] = [()] * device_count
    for place, device in enumerate(sharding.tile_assignment_devices()):
        shard, rest = [], place
        for size in reversed(sizes):
            rest, index = divmod(rest, size)
            shard.append(index)
        shard_of_device[device] = tuple(reversed(shard))[:rank]
    return tuple(shard_of_device)


def memory_figures(executable: Any) -> tuple[int, int, int, int]:
    """Bytes on one device: (arguments, outputs, outputs that alias arguments, temporaries)."""
    stats = executable.get_compiled_memory_stats()
    return (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )


# ---- running ---------------------------------------------------------------
def execute(executable: Any, arrays: Sequence[Any], handlers: Sequence[Any]) -> list[Any]:
    """Start one run; returns global arrays at once, each made by its handler."""
    return list(executable.execute_sharded(arrays).consume_with_handlers(handlers))


def result_handler(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """A function making a global `jax.Array` from an output's per-device buffers, without checks."""
    import jax

    aval = jax.core.ShapedArray(shape, dtype)
    handler = _module("jaxlib._jax").array_result_handler
    try:
        return handler(aval, sharding, committed=True, _skip_checks=True)
    except TypeError:  # newer jaxlib has no checks to skip
        return handler(aval, sharding, committed=True)


def put_part(part: Any, array_type: Any, sharding: Any, device: Any) -> Any:
    """A global `jax.Array` of which this process has one part, numpy's or on `device`, in one step.

    array_type: the `aval` of an array of this shape, type and sharding.
    """
    return _module("jax._src.interpreters.pxla").batched_device_put(array_type, sharding, [part], [device])


# ---- jax.distributed ----------------------------------------------------------


def start_coordination_service(address: str, size: int, *, recoverable: bool = False) -> Any:
    """The coordination service of `jax.distributed` for `size` processes, listening on `host:port`.

    recoverable: a process that is lost ends no other, if these set `jax_enable_recoverability`. `shutdown()` ends the
    service. Its log is silenced where this loads jaxlib. Raises RuntimeError where the port cannot be had.
    """
    level = "TF_CPP_MIN_LOG_LEVEL"
    before = os.environ.get(level)
    os.environ[level] = before or "3"
    try:
        return _module("jaxlib._jax").get_distributed_runtime_service(
            address, size, recoverable=recoverable, shutdown_timeout=SHUTDOWN_PATIENCE_S
        )
    finally:
        if before is None:
            del os.environ[level]


def coordination_client() -> Any:
    """This process's connection to the coordination service: a store of keys and values; None outside of a job."""
    return _module("jax._src.distributed").global_state.client


def place_in_distributed() -> tuple[int, int]:
    """This process's number in `jax.distributed`, and how many there are; needs no devices."""
    state = _module("jax._src.distributed").global_state
    return int(state.process_id), int(state.num_processes)


def forget_place_in_distributed() -> None:
    """Let devices be those of a process alone: JAX keeps the number that it had in `jax.distributed`."""
    state = _module("jax._src.distributed").global_state
    state.process_id, state.num_processes = 0, 1


def has_devices() -> bool:
    """Whether JAX has devices already."""
    return bool(_module("jax._src.xla_bridge").backends_are_initialized())


def find_tpu_pod() -> tuple[int, int, str] | None:
    """This process's number, their count and the coordinator's `host:port`, on a TPU's machine; None elsewhere.

    JAX asks the metadata server.
    """
    if not getattr(_module("jax._src.cloud_tpu_init"), "running_in_cloud_tpu_vm", False):
        return None
    return _ask_cluster(_module("jax._src.clusters").GceTpuCluster)


def find_kubernetes_job() -> tuple[int, int, str] | None:
    """The same of a pod; None without the package `kubernetes`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _ask_cluster(_module("jax._src.clusters").K8sCluster)


def _ask_cluster(cluster: Any) -> tuple[int, int, str] | None:
    if not cluster.is_env_present():
        return None
    count = int(cluster.get_process_count())
    if count == 1:
        return 0, 1, ""
    port = os.environ.get("JAX_COORDINATOR_PORT")
    return int(cluster.get_process_id()), count, str(cluster.get_coordinator_address(300, port))


def forget_coordination_client() -> None:
    """Leave `jax.distributed` without a word: for a connection that can no longer be shut down."""
    state = _module("jax._src.distributed").global_state
    state.client = None
    state.preemption_sync_manager = None
    if state.service is not None:
        state.service.shutdown()
        state.service = None


# ---- arrays that are elsewhere, as jax's own ---------------------------------------


def register_array_type(cls: type, value_of: Callable[[Any], Any]) -> None:
    """Make `cls`, a subclass of `jax.Array` with an `aval`, an array to all of jax.

    While a function is traced, its instances stay unchanged: constants of the jaxpr. When a computation on this
    machine, or a program's text, needs their contents, `value_of` returns them in an array known to jax.
    """
    mlir, pxla = _module("jax._src.interpreters.mlir"), _module("jax._src.interpreters.pxla")

    def on_devices(arrays: Sequence[Any], *how: Any) -> Any:
        distinct = {id(array): array for array in arrays}
        for array in distinct.values() if len(distinct) > 1 else ():
            array.copy_to_host_async()
        values = {key: value_of(array) for key, array in distinct.items()}
        return pxla.shard_args(*how, [values[id(array)] for array in arrays])

    def in_text(array: Any, aval: Any) -> Any:
        value = value_of(array)
        return mlir.get_constant_handler(type(value))(value, aval)

    _module("jax._src.core").pytype_aval_mappings[cls] = lambda array: array.aval
    _module("jax._src.dtypes").register_canonicalize_value_handler(cls, None)
    pxla.shard_arg_handlers[cls] = on_devices
    mlir.register_constant_handler(cls, in_text)


def register_key_type(cls: type, value_of: Callable[[Any], Any]) -> None:
    """Make `cls`, registered as an array type, an array of PRNG keys to `jax.random`."""

    def attribute(name: str) -> property:
        return property(lambda array: getattr(value_of(array), name))

    for name in ("_impl", "_base_array", "_consumed"):
        setattr(cls, name, attribute(name))
    _module("jax._src.tree_util").dispatch_registry.register_node(
        cls, lambda array: ((value_of(array),), None), lambda _, values: values[0]
    )


def attribute_while_traced(array: Any, name: str) -> Any:
    """The `jax.Array` attribute of that name, on an array with unknown contents in a traced function."""
    if name == "__getitem__":
        return lambda index: array.aval._getitem(array, index)
    if name == "__iter__":
        return lambda: array.aval._iter(array)
    return getattr(_module("jax._src.array").ArrayImpl, name).__get__(array)


def make_weakly_typed(value: Any) -> Any:
    """The array with a weak type, like Python numbers."""
    return _module("jax._src.lax.lax")._convert_element_type(value, weak_type=True)


def trace_context() -> Any:
    """Equal, with equal hashes, under equal jax settings of tracing and lowering."""
    return _module("jax._src.config").trace_context()
