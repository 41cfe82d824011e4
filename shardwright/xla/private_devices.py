"""Descriptions of devices that are not here, by names of jaxlib's that `private` lists and looks up."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

#: Modules of jaxlib with the calls of CUDA's libraries, which they find in the packages of the plugin.
_GPU_CALLS = ("jaxlib.gpu_solver", "jaxlib.gpu_linalg", "jaxlib.gpu_prng", "jaxlib.gpu_sparse")


def describe_gpus(folder: str, library: str, name: str, shape: str, description: str) -> list[Any]:
    """Descriptions of GPUs, in a process that opens none.

    folder: of the packages. library: the plugin's path in it. shape: slices × nodes × GPUs of one, `1x2x8`.
    description: XLA's GpuTargetConfigProto.
    """
    xla_client: Any = import_module("jaxlib.xla_client")
    plugin = xla_client.load_pjrt_plugin_dynamically("cuda", f"{folder}/{library}")
    xla_client.initialize_pjrt_plugin("cuda")
    _register_gpu_calls(folder, plugin)
    topology = xla_client.make_c_api_device_topology(plugin, name, topology=shape, target_config=description)
    return list(topology._make_compile_only_devices())


def _register_gpu_calls(folder: str, plugin: Any) -> None:
    """Make calls of CUDA's libraries known to the compiler, as jax does where it opens GPUs: it asks for their
    handlers, and which of them take a batch apart. None of the libraries is loaded.
    """
    sys.path.append(folder)
    xla_client: Any = import_module("jaxlib.xla_client")
    extension: Any = import_module("jax_cuda12_plugin.cuda_plugin_extension")
    xla_client.register_custom_type_handler("CUDA", partial(extension.register_custom_type, plugin))
    xla_client.register_custom_call_handler("CUDA", partial(extension.register_custom_call_target, plugin))
    for name, kind in extension.ffi_types().items():
        xla_client.register_custom_type(name, kind, platform="CUDA")
    for name, handler in extension.ffi_handlers().items():
        xla_client.register_custom_call_target(name, handler, platform="CUDA", api_version=1)
    for module in map(import_module, _GPU_CALLS):
        for name, function, version in module.registrations()["CUDA"]:
            xla_client.register_custom_call_target(name, function, platform="CUDA", api_version=version)
        for name in getattr(module, "batch_partitionable_targets", list)():
            xla_client.register_custom_call_as_batch_partitionable(name, plugin)


def describe_tpus(topology: str, *, chips_per_host: int) -> list[Any]:
    """Descriptions of the chips of a TPU topology, such as `v5e:2x4`; libtpu's path is in TPU_LIBRARY_PATH.

    chips_per_host: four, or one of a single chip.
    """
    from jax.experimental import topologies

    bounds = {1: (1, 1, 1), 4: (2, 2, 1)}[chips_per_host]
    return list(topologies.get_topology_desc(topology, "tpu", chips_per_host_bounds=bounds).devices)
