"""Options of measurements that compile for GPUs without one (`shardwright.xla.compilers`).

The compiler is a folder of packages: jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, in the versions of
the installed jax (`make gpu-packages`). Autotuning is off and products go to cuBLAS: the rest needs a device.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shardwright.xla.compilers import GPU_PACKAGES
from shardwright.xla.compilers import describe_gpus as compile_only_devices
from shardwright.xla.compilers import gpu_environment as compiler_environment
from shardwright.xla.gpu_descriptions import GPU_DESCRIPTIONS as TARGETS

__all__ = ["PACKAGES_VARIABLE", "TARGETS", "compile_only_devices", "compiler_environment"]

#: Environment variable with the folder, the default of the option.
PACKAGES_VARIABLE = GPU_PACKAGES.variable


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
