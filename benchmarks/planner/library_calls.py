"""Calls of cuBLAS and cuDNN in XLA:GPU's optimized text: their arithmetic, and the bytes of their results."""

from __future__ import annotations

import re
from math import prod

from benchmarks.planner.partitioned_text import CountingError, Instruction
from benchmarks.planner.products import flops_of_shapes
from benchmarks.planner.traffic import Body

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')

#: Calls of cuDNN's convolutions → indices into (first operand, second operand, result) of the forward convolution's
#: input, kernel and output; labels and window are the forward convolution's.
_CONVOLUTIONS = {
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convForwardGraph": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}


def call_flops(call: Instruction, body: Body) -> tuple[str, float]:
    """(element type of the operands, operations) of a product or convolution; ("", 0.0) of any other call.

    Raises CountingError for an unknown call of cuBLAS or cuDNN.
    """
    match = _TARGET.search(call.attributes)
    target = match[1] if match else ""
    if target.startswith(("__cublas$", "__cublas$lt$")):
        return body[call.operands[0]].element_type, _product_flops(call, body)
    if target in _CONVOLUTIONS:
        shapes = (body[call.operands[0]].dims, body[call.operands[1]].dims, call.dims)
        lhs, rhs, out = (shapes[place] for place in _CONVOLUTIONS[target])
        return body[call.operands[0]].element_type, flops_of_shapes(call, lhs, rhs, out)
    if target.startswith(("__cublas", "__cudnn")):
        raise CountingError(f"the operations of {target} are not known")
    return "", 0.0


def _product_flops(call: Instruction, body: Body) -> float:
    """2 × result elements × contracted elements."""
    contracted = _CONTRACTED.search(call.attributes)
    if contracted is None:
        raise CountingError(f"{call.name} has no dimension numbers")
    lhs = body[call.operands[0]].dims
    return 2.0 * prod(call.dims) * prod(lhs[int(dim)] for dim in re.findall(r"\d+", contracted[1]))


def result_bytes(call: Instruction) -> int:
    """Bytes of all results but the workspace: a tuple's last array, of one dimension."""
    kind, dims = call.arrays[-1]
    has_workspace = len(call.arrays) > 1 and kind in ("s8", "u8") and len(dims) == 1
    return call.size_bytes - (dims[0] if has_workspace else 0)
