"""Descriptions of GPUs, as XLA's compiler takes them in place of a device."""

from __future__ import annotations

#: NVIDIA's figures in XLA's format (stream_executor.GpuTargetConfigProto). A100 SXM4 80 GB, H100 SXM5
#: 80 GB: datasheets (June 2021, 2023), CUDA C++ Programming Guide, "Compute Capabilities".
GPU_DESCRIPTIONS = {
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
