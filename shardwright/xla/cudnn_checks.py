"""JAX's checks of cuDNN's attention, answered for devices that may be elsewhere.

`jax.nn.dot_product_attention(implementation="cudnn")` asks this machine, while it is traced, for its version of cuDNN
and for the compute capability of its GPU (jax 0.10.2 to 0.12.0, `jax/_src/cudnn/fused_attention_stablehlo.py`). A
client has neither: while a program is lowered for devices, these functions answer for them. Other threads, and this one
afterwards, get JAX's own answers. Pallas asks for the GPU when it lowers a Triton kernel (jax 0.12.0,
`jax/_src/pallas/triton/gpu_info.py`): it gets the same capability.

Devices without the kernel run the calls written out (`xla.attention`). Their compute capability is answered as it is,
lower than any that has one, since libraries ask for it before they choose the kernel by themselves (Keras).
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwright.xla.replaced_names import Place, ReplacedNames

_log = logging.getLogger("shardwright")

MODULE = "jax._src.cudnn.fused_attention_stablehlo"

#: What Pallas asks for the GPU that a Triton kernel is lowered for, and the package that it is a part of.
TRITON_MODULE, _PALLAS = "jax._src.pallas.triton.gpu_info", "jax._src.pallas"

#: JAX's functions that ask this machine.
CHECKS = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")

#: The calls of attention, and how they are lowered for CUDA.
LOWERINGS = {
    "_dot_product_attention_fwd_p": "_dot_product_attention_fwd_cuda_lowering",
    "_dot_product_attention_bwd_p": "_dot_product_attention_bwd_cuda_lowering",
    "_dot_product_attention_fp8_fwd_p": "_dot_product_attention_fp8_fwd_cuda_lowering",
    "_dot_product_attention_fp8_bwd_p": "_dot_product_attention_fp8_bwd_cuda_lowering",
}

#: Answered where nobody says what the devices are: Hopper, with a cuDNN that has all that JAX asks for.
ASSUMED_CAPABILITY, ASSUMED_CUDNN = "9.0", "9.11"

#: Of devices that are not CUDA's: lower than all.
_NO_CAPABILITY = "0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDevice:
    """Devices that a program is lowered for.

    compute_capability, cudnn_version: of CUDA devices, `9.0` and `9.11`; "": not known.
    is_here: whether they are this machine's: JAX asks them itself, if it has them.
    """

    platform: str
    compute_capability: str = ""
    cudnn_version: str = ""
    is_here: bool = False

    @property
    def is_assumed(self) -> bool:
        return self.platform == "cuda" and not (self.compute_capability and self.cudnn_version)

    @property
    def answers(self) -> tuple[tuple[int, ...], int]:
        """(compute capability, cuDNN's version as it counts it)."""
        is_cuda = self.platform == "cuda"
        capability = (self.compute_capability or ASSUMED_CAPABILITY) if is_cuda else _NO_CAPABILITY
        major, minor = _numbers(self.cudnn_version or ASSUMED_CUDNN)
        return _numbers(capability), major * 10_000 + minor * 100


_device: ContextVar[AttentionDevice | None] = ContextVar("attention_device", default=None)  # named for this thread


def _places() -> list[Place]:
    """JAX's functions; names that another JAX lacks stay as they are."""
    module = _module()
    places: list[Place] = [(module, name, partial(_answering, name)) for name in CHECKS if hasattr(module, name)]
    triton = _module(TRITON_MODULE) if _PALLAS in sys.modules else None
    return [*places, (triton, "get_gpu_info", partial(_describing, triton))] if triton is not None else places


_answers = ReplacedNames(_places)


@contextmanager
def lowering_for(device: AttentionDevice) -> Iterator[None]:
    """Programs are lowered for these devices, in this thread."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


@contextmanager
def answer_checks(platform: str) -> Iterator[None]:
    """JAX's checks are answered, in this thread, for the devices that `lowering_for` names; without one for this
    machine's if it has any, else for assumed ones. Names that another JAX lacks stay as they are."""
    device = _device.get()
    if device is None or device.platform != platform:
        device = AttentionDevice(platform=platform, is_here=True)
    with _answers.replaced(), lowering_for(device):
        yield


def _answering(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*arguments: Any) -> Any:
        device = _device.get()
        if device is None or (device.is_here and _has_cuda()):
            return original(*arguments)
        capability, cudnn_version = device.answers
        if name == "check_cudnn_version":
            if device.is_assumed:
                _log.info(
                    "compute capability %s and cuDNN %s are assumed: nobody says what the devices are",
                    ASSUMED_CAPABILITY, ASSUMED_CUDNN,
                )  # fmt: skip
            _register_lowerings(device.platform)
            return cudnn_version
        asked = _numbers(arguments[0])
        return capability >= asked if name == "check_compute_capability" else capability == asked

    return answer


def _describing(triton: Any, original: Callable[[], Any]) -> Callable[[], Any]:
    def answer() -> Any:
        device = _device.get()
        if device is None or device.platform != "cuda" or (device.is_here and _has_cuda()):
            return original()
        (major, minor), _ = device.answers
        return triton.GpuInfo(gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor)

    return answer


def _register_lowerings(platform: str) -> None:
    """Have JAX write the calls for devices that run them written out, too: as for CUDA."""
    if platform == "cuda":
        return
    from jax.interpreters import mlir

    module = _module()
    for primitive, rule in LOWERINGS.items():
        mlir.register_lowering(getattr(module, primitive), getattr(module, rule), platform=platform)


def _module(name: str = MODULE) -> Any:
    """JAX's module of the checks, or another one; None in a JAX that has none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _has_cuda() -> bool:
    """Whether JAX here has CUDA devices and cuDNN."""
    module = _module()
    return module.cuda_versions is not None and "cuda" in module.xla_bridge.get_backend().platform_version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
