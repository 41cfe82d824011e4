"""GPUs that XLA:GPU compiles for without one: their descriptions, and devices of them.

The compiler is in a folder of packages: jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, the versions of
the jax here (`make gpu-packages`). Nothing is tuned, and products go to cuBLAS: the rest takes a device.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

#: NVIDIA's figures, as XLA asks devices for them (stream_executor.GpuTargetConfigProto). A100 SXM4 80 GB, H100 SXM5
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

#: Names the folder where no option does.
PACKAGES_VARIABLE = "SHARDWRIGHT_GPU_PACKAGES"


def add_packages_option(parser: argparse.ArgumentParser) -> None:
    """`--gpu-packages FOLDER` of a command that compiles for GPUs."""
    parser.add_argument(
        "--gpu-packages", metavar="FOLDER", default=os.environ.get(PACKAGES_VARIABLE),
        help=f"with the compiler for GPUs (make gpu-packages; default: {PACKAGES_VARIABLE})",
    )  # fmt: skip


def require_packages(arguments: argparse.Namespace) -> None:
    """Have `packages` answer with the folder that was given; end the command where there is no compiler in it."""
    folder: str | None = arguments.gpu_packages
    if folder is None or not (Path(folder) / "jax_plugins").is_dir():
        sys.exit(f"no compiler for GPUs in {folder}: make gpu-packages, then --gpu-packages or {PACKAGES_VARIABLE}")
    os.environ[PACKAGES_VARIABLE] = str(Path(folder).resolve())


def packages() -> str:
    """The folder with the compiler, of the process or the one that started it."""
    return os.environ[PACKAGES_VARIABLE]


def environment(folder: str) -> dict[str, str]:
    """What a process that compiles with a folder's packages has in its environment before it imports JAX."""
    return {
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{folder}/nvidia/cuda_nvcc/bin:{os.environ['PATH']}",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder}/nvidia/cuda_nvcc "
        "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    }


def compile_only_devices(folder: str, target: str, count: int) -> list[Any]:
    """`count` devices of a target, nodes of eight, that programs are compiled for and never run on."""
    from jaxlib import xla_client

    library = f"{folder}/jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    plugin = xla_client.load_pjrt_plugin_dynamically("cuda", library)
    xla_client.initialize_pjrt_plugin("cuda")
    inside = min(count, _PER_NODE)
    shape = f"1x{count // inside}x{inside}"
    topology = xla_client.make_c_api_device_topology(plugin, target, topology=shape, target_config=TARGETS[target])
    devices: list[Any] = topology._make_compile_only_devices()
    return devices
