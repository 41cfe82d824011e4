"""GPU descriptions and compile-only devices: targets of XLA:GPU without a GPU.

The compiler is a folder of packages: jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, in the versions of
the installed jax (`make gpu-packages`). Autotuning is off and products go to cuBLAS: the rest needs a device.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

#: NVIDIA's figures in XLA's format (stream_executor.GpuTargetConfigProto). A100 SXM4 80 GB, H100 SXM5
#: 80 GB: datasheets (June 2021, 2023), CUDA C++ Programming Guide, "Compute Capabilities".
TARGETS = {
    "a100": """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912
  core_count: 108 fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2039000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41 device_memory_size: 84986691584
  cuda_compute_capability { major: 8 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  runtime_version: "12.9.0" driver_version: "12.9.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA A100-SXM4-80GB"
""",
    "h100": """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  runtime_version: "12.9.0" driver_version: "12.9.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
""",
}

_PER_NODE = 8

#: Environment variable with the folder, the default of the option.
PACKAGES_VARIABLE = "SHARDWRIGHT_GPU_PACKAGES"


def add_packages_option(parser: argparse.ArgumentParser) -> None:
    """Add `--gpu-packages FOLDER` to a command."""
    parser.add_argument(
        "--gpu-packages", metavar="FOLDER", default=os.environ.get(PACKAGES_VARIABLE),
        help=f"with the compiler for GPUs (make gpu-packages; default: {PACKAGES_VARIABLE})",
    )  # fmt: skip


def require_packages(arguments: argparse.Namespace) -> None:
    """Export the given folder for `packages_folder`; exit if it has no compiler."""
    folder: str | None = arguments.gpu_packages
    if folder is None or not (Path(folder) / "jax_plugins").is_dir():
        sys.exit(f"no compiler for GPUs in {folder}: make gpu-packages, then --gpu-packages or {PACKAGES_VARIABLE}")
    os.environ[PACKAGES_VARIABLE] = str(Path(folder).resolve())


def packages_folder() -> str:
    """The folder with the compiler, set by this process or its parent."""
    return os.environ[PACKAGES_VARIABLE]


def compiler_environment(folder: str) -> dict[str, str]:
    """Environment of a compiling process; to be set before it imports JAX."""
    return {
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{folder}/nvidia/cuda_nvcc/bin:{os.environ['PATH']}",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder}/nvidia/cuda_nvcc "
        "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    }


def compile_only_devices(folder: str, target: str, count: int) -> list[Any]:
    """Make `count` compile-only devices of a target, in nodes of eight."""
    from jaxlib import xla_client

    library = f"{folder}/jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    plugin = xla_client.load_pjrt_plugin_dynamically("cuda", library)
    xla_client.initialize_pjrt_plugin("cuda")
    devices_per_node = min(count, _PER_NODE)
    shape = f"1x{count // devices_per_node}x{devices_per_node}"
    topology = xla_client.make_c_api_device_topology(plugin, target, topology=shape, target_config=TARGETS[target])
    devices: list[Any] = topology._make_compile_only_devices()
    return devices
