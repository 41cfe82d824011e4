"""What XLA:GPU needs for a plan: `gpu_judge.py STEP.hlo PLAN.json PACKAGES` prints its memory figures as JSON.

Run by `check_memory.py`. It compiles for A100s without one: PACKAGES is a folder with jax-cuda12-plugin,
jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12 in it (`pip install --no-deps --target PACKAGES …`, the versions of the jax
here). Nothing is tuned, and products go to cuBLAS: the rest takes a device.
"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "PATH": f"{sys.argv[3]}/nvidia/cuda_nvcc/bin:{os.environ['PATH']}",
    "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={sys.argv[3]}/nvidia/cuda_nvcc "
    "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}

from jaxlib import xla_client
from memory_judge import print_memory, read_step

#: NVIDIA's figures for an A100 SXM4 80 GB, as XLA asks devices for them (stream_executor.GpuTargetConfigProto).
A100 = """
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
"""


def main() -> None:
    text, plan = read_step(*sys.argv[1:3])
    library = f"{sys.argv[3]}/jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    plugin = xla_client.load_pjrt_plugin_dynamically("cuda", library)
    xla_client.initialize_pjrt_plugin("cuda")
    shape = f"1x1x{plan.mesh.device_count}"
    topology = xla_client.make_c_api_device_topology(plugin, "a100", topology=shape, target_config=A100)
    print_memory(text, plan, topology._make_compile_only_devices(), "cuda")


if __name__ == "__main__":
    main()
