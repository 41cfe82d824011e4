"""Compilers of devices that are not here: XLA for A100, H100 and TPU v5e, out of a folder of packages.

A GPU's compiler is JAX's plugin for CUDA with a description of the GPU; autotuning is off and products go to cuBLAS:
the rest needs a device. A TPU's is libtpu with a topology. Neither is a dependency: whoever asks for one installs its
packages beside (`make gpu-packages`, `make tpu-packages`, or the command that the error names).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwright.errors import OptionError, PlatformError
from shardwright.spelling import did_you_mean
from shardwright.xla import private_devices
from shardwright.xla.gpu_descriptions import GPU_DESCRIPTIONS

#: GPUs of a node, as in DGX and HGX machines.
GPUS_PER_NODE = 8

#: Chips of the slices that Google Cloud has of a v5e, as libtpu names their topologies
#: (cloud.google.com/tpu/docs/v5e, "Configurations"); the one chip is a host of its own.
_V5E_TOPOLOGIES = {
    1: "v5e:1x1", 4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4", 32: "v5e:4x8", 64: "v5e:8x8", 128: "v5e:8x16",
    256: "v5e:16x16",
}  # fmt: skip

_TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """Where a compiler comes from.

    variable: environment variable with their folder. make: the target that installs them in a checkout, into
    `build/` under the same name. library: the compiler's path in the folder. distribution: its package.
    requirements: what pip installs for the jax that is here.
    """

    variable: str
    make: str
    library: str
    distribution: str
    requirements: Callable[[], Sequence[str]]

    def find(self, folder: str | None = None) -> str:
        """The folder with the compiler: the given one, the variable's, `build/` here or in the checkout, or the
        environment's own packages.

        Raises PlatformError with the command that installs it: none is there, or it is another jax's.
        """
        named = folder or os.environ.get(self.variable)
        places = [Path(named)] if named else [*self._usual_places()]
        for place in places:
            if (place / self.library).is_file():
                self._require_version(place)
                return str(place.resolve())
        looked = ", ".join(map(str, places))
        raise PlatformError(f"no compiler ({self.library}) in {looked}", remedy=self.remedy)

    def _usual_places(self) -> list[Path]:
        checkout = Path(__file__).resolve().parents[2]
        places = [Path("build") / self.make, checkout / "build" / self.make]
        with suppress(metadata.PackageNotFoundError):
            places.append(Path(str(metadata.distribution(self.distribution).locate_file(""))))
        return list(dict.fromkeys(places))

    def _require_version(self, folder: Path) -> None:
        """Raises PlatformError for a compiler of another version than the jax that is here wants."""
        name = f"{self.distribution.replace('-', '_')}-"
        versions = [
            path.name.removeprefix(name).removesuffix(".dist-info") for path in folder.glob(f"{name}*.dist-info")
        ]
        wanted = next((each for each in self.requirements() if each.startswith(f"{self.distribution}==")), "")
        if wanted and versions and not any(fnmatchcase(version, wanted.partition("==")[2]) for version in versions):
            raise PlatformError(
                f"{folder} holds {self.distribution} {versions[0]}, jax {metadata.version('jax')} goes with {wanted}",
                remedy=self.remedy,
            )

    @property
    def remedy(self) -> str:
        """How to install them: in a checkout, and anywhere."""
        wanted = " ".join(f"'{requirement}'" for requirement in self.requirements())
        return (
            f"in a checkout: make {self.make}; anywhere: pip install --no-deps --target FOLDER {wanted}, "
            f"then {self.variable}=FOLDER"
        )


def _gpu_requirements() -> Sequence[str]:
    version = metadata.version("jaxlib")
    return f"jax-cuda12-plugin=={version}", f"jax-cuda12-pjrt=={version}", "nvidia-cuda-nvcc-cu12"


def _tpu_requirements() -> Sequence[str]:
    """The version that the jax that is here names for its extra `tpu`."""
    return [each.partition(";")[0].strip() for each in metadata.requires("jax") or () if each.startswith("libtpu")]


GPU_PACKAGES = Packages(
    variable="SHARDWRIGHT_GPU_PACKAGES",
    make="gpu-packages",
    library="jax_plugins/xla_cuda12/xla_cuda_plugin.so",
    distribution="jax-cuda12-pjrt",
    requirements=_gpu_requirements,
)

TPU_PACKAGES = Packages(
    variable="SHARDWRIGHT_TPU_PACKAGES",
    make="tpu-packages",
    library="libtpu/libtpu.so",
    distribution="libtpu",
    requirements=_tpu_requirements,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A compiler of devices that are not here. platform: of programs that it takes, in JAX's spelling."""

    name: str
    platform: str
    packages: Packages

    def require_slice(self, device_count: int) -> None:
        """Raises OptionError where no machine, or slice of one, of this kind has so many devices."""
        if self.platform == "tpu" and device_count not in _V5E_TOPOLOGIES:
            sizes = ", ".join(map(str, _V5E_TOPOLOGIES))
            raise OptionError(
                f"{device_count} devices: there are slices of {sizes} chips of a TPU v5e",
                where=self.name,
                remedy="plan for as many devices as a slice has",
            )
        if self.platform == "cuda" and device_count > GPUS_PER_NODE and device_count % GPUS_PER_NODE:
            raise OptionError(
                f"{device_count} devices are no whole number of nodes of {GPUS_PER_NODE} GPUs",
                where=self.name,
                remedy=f"plan for up to {GPUS_PER_NODE} devices, or for a multiple",
            )

    def environment(self, folder: str) -> Mapping[str, str]:
        """Variables of a process that compiles; to be set before it imports JAX. folder: `Packages.find`'s."""
        if self.platform == "tpu":
            return {**_TPU_ENVIRONMENT, "TPU_LIBRARY_PATH": f"{folder}/{self.packages.library}"}
        return gpu_environment(folder)

    def describe_devices(self, folder: str, device_count: int) -> list[Any]:
        """Descriptions of that many devices, in mesh order, in a process with `environment`."""
        self.require_slice(device_count)
        if self.platform == "tpu":
            return private_devices.describe_tpus(
                _V5E_TOPOLOGIES[device_count], chips_per_host=1 if device_count == 1 else 4
            )
        return describe_gpus(folder, self.name, device_count)


#: By name, as `shardwright verify --on` and `plan.prove(on=…)` take them.
COMPILERS: Mapping[str, Compiler] = {
    "a100": Compiler(name="a100", platform="cuda", packages=GPU_PACKAGES),
    "h100": Compiler(name="h100", platform="cuda", packages=GPU_PACKAGES),
    "tpu-v5e": Compiler(name="tpu-v5e", platform="tpu", packages=TPU_PACKAGES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerInFolder:
    """A compiler, the folder of its packages, and the devices of the machine that it compiles for: what a compile child
    is told.
    """

    name: str
    folder: str
    device_count: int

    @property
    def compiler(self) -> Compiler:
        return COMPILERS[self.name]

    @property
    def environment(self) -> Mapping[str, str]:
        return self.compiler.environment(self.folder)


def find_compiler(name: str, device_count: int, folder: str | None = None) -> CompilerInFolder:
    """The compiler of that name, for a machine of that many devices. folder: of its packages (`Packages.find`).

    Raises OptionError for an unknown name and a number of devices that no machine has, PlatformError where its packages
    are missing.
    """
    compiler = COMPILERS.get(name)
    if compiler is None:
        remedy = did_you_mean(name, COMPILERS) or f"one of {', '.join(COMPILERS)}"
        raise OptionError(f"no compiler for {name!r}", where="on", remedy=remedy)
    compiler.require_slice(device_count)
    return CompilerInFolder(name=name, folder=compiler.packages.find(folder), device_count=device_count)


def gpu_environment(folder: str) -> dict[str, str]:
    """Variables of a process that compiles for GPUs. folder: of `GPU_PACKAGES`.

    Compiled kernels of Mosaic call a library for their launches, which JAX names where its plugin is installed.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_RUNTIME_LIB_PATH": f"{folder}/jax_cuda12_plugin/libmosaic_gpu_runtime.so",
        "PATH": f"{folder}/nvidia/cuda_nvcc/bin:{os.environ['PATH']}",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder}/nvidia/cuda_nvcc "
        "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    }


def describe_gpus(folder: str, name: str, count: int) -> list[Any]:
    """Descriptions of `count` GPUs of a kind, in nodes of eight, in a process with `gpu_environment`."""
    per_node = min(count, GPUS_PER_NODE)
    shape = f"1x{count // per_node}x{per_node}"
    return private_devices.describe_gpus(folder, GPU_PACKAGES.library, name, shape, GPU_DESCRIPTIONS[name])
