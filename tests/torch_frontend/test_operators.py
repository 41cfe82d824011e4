"""Lowerings beside eager PyTorch on PyTorch's own samples of each operator, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils import _pytree

from shardwright.client.frontends.torch.dtypes import to_numpy, to_tensor
from shardwright.client.frontends.torch.evaluation import Evaluation
from shardwright.client.frontends.torch.tracing import Graph, TensorType, trace
from shardwright.errors import UnsupportedProgramError

methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")

pytestmark = pytest.mark.slow

#: Samples of an operator, spread over PyTorch's and divided among its variants; each variant has a few.
SAMPLES = 20
LEAST_OF_A_VARIANT = 3

OPERATORS = """
_upsample_bilinear2d_aa abs acos acosh add addbmm addcdiv addcmul addmm addmv all amax amin any arange argmax argmin
argsort asin asinh atan atan2 atanh baddbmm bmm bucketize cat ceil clamp clamp_max clamp_min clone complex
constant_pad_nd contiguous copysign cos cdist cosh count_nonzero cummax cummin cumprod cumsum diag_embed diagonal diff
digamma div dot einsum eq erf erfc erfinv exp exp2 expand expm1 eye fft.fft fft.irfft fft.rfft fill flip floor
floor_divide fmax fmin fmod frac full full_like gather ge gt hypot index_add index_copy index_put index_select
isfinite isinf isnan le lerp lgamma linalg.eigvalsh linspace log log10 log1p log2 log_softmax logaddexp logcumsumexp
logical_and logical_not logical_or logsumexp lt masked_fill masked_scatter masked_select matmul max maximum mean
median min minimum mm mul mv nan_to_num nansum native_batch_norm native_layer_norm ne neg new_full new_zeros
nn.functional.adaptive_avg_pool2d nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.binary_cross_entropy
nn.functional.binary_cross_entropy_with_logits nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d
nn.functional.conv_transpose2d nn.functional.cosine_similarity nn.functional.cross_entropy nn.functional.elu
nn.functional.embedding nn.functional.embedding_bag nn.functional.gelu nn.functional.glu nn.functional.group_norm
nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.huber_loss
nn.functional.instance_norm nn.functional.interpolate nn.functional.kl_div nn.functional.layer_norm
nn.functional.leaky_relu nn.functional.linear nn.functional.logsigmoid nn.functional.max_pool2d nn.functional.mish
nn.functional.mse_loss nn.functional.nll_loss nn.functional.normalize nn.functional.pad nn.functional.pixel_shuffle
nn.functional.prelu nn.functional.relu nn.functional.relu6 nn.functional.rms_norm
nn.functional.scaled_dot_product_attention nn.functional.selu nn.functional.silu nn.functional.smooth_l1_loss
nn.functional.softmin nn.functional.softplus nn.functional.unfold nn.functional.upsample_bilinear
nn.functional.upsample_nearest ones_like outer permute pow prod reciprocal remainder repeat repeat_interleave reshape
roll round rsqrt rsub scatter scatter_add scatter_reduce searchsorted select select_scatter sgn sigmoid sign signbit
sin sinh slice slice_scatter softmax sort split sqrt square squeeze stack std sub sum t take tan tanh tile topk
transpose tril triu trunc unbind unfold unsqueeze var var_mean view where xlogy zeros_like
""".split()  # noqa: SIM905

#: Relative error, and absolute error of results up to 1, by element type.
BOUNDS = {torch.float32: (2e-4, 1e-5), torch.bfloat16: (2**-5, 2**-5)}

#: Samples whose shape, or whose choice, depends on values; or arguments that no training step has.
WITHOUT = {
    "masked_select": "the result's size depends on values",
}


#: What is refused: sizes by values.
REFUSALS = ("size depends on values", "aten.repeat_interleave.Tensor")

#: Operators of order: among equal elements, which bfloat16 has many of, each implementation has its own.
BY_ORDER = ("argsort", "cummax", "cummin", "median", "sort", "topk")

#: Operators whose gradient is a small sum of large numbers: eager bfloat16 is no oracle.
BY_DIFFERENCE = ("addcmul", "nn.functional.normalize")


def infos(name: str) -> list[Any]:
    """Variants of one operator, e.g. pads by mode."""
    return [info for info in methods.op_db if info.name == name]


def test_every_operator_is_known() -> None:
    assert [name for name in OPERATORS if not infos(name)] == []


def weighted(value: Any) -> Any:
    """Σ w x, with weights from ½ to 3⁄2 by position."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    return (flat * torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype)).sum()


def forward_and_backward(call: Any, inputs: list[Any], differentiable: list[bool]) -> list[Any]:
    """Results, and gradients of inputs, of a weighted sum of all elements."""
    inputs = [v.detach().requires_grad_(is_wanted) for v, is_wanted in zip(inputs, differentiable, strict=True)]
    outputs = [v for v in _pytree.tree_leaves(call(inputs)) if isinstance(v, torch.Tensor)]
    gradients = []
    if any(differentiable):
        total = sum(weighted(v) for v in outputs if v.requires_grad)
        if isinstance(total, torch.Tensor):
            wanted = [v for v in inputs if v.requires_grad]
            gradients = [g for g in torch.autograd.grad(total, wanted, allow_unused=True) if g is not None]
    return [v.detach() for v in [*outputs, *gradients]]


def spread(samples: list[Any], count: int) -> list[Any]:
    step = max(len(samples) // count, 1)
    return samples[::step][:count]


@dataclass
class Case:
    """One sample of one form of an operator: what was traced, on what, and what eager PyTorch makes of it."""

    title: str
    graph: Graph
    inputs: list[Any]
    wanted: list[Any]


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in WITHOUT])
def test_operator(name: str, dtype: Any) -> None:
    variants = [info for info in infos(name) if dtype in info.dtypes]
    if not variants or (dtype is torch.bfloat16 and name in BY_ORDER):
        pytest.skip(f"no samples in {dtype}")  # PyTorch has none, or eager PyTorch is no oracle of them
    count = max(SAMPLES // len(variants), LEAST_OF_A_VARIANT)
    cases = [case for info in variants for case in trace_samples(info, dtype, count)]
    assert cases
    compare(cases, bounds=BOUNDS[dtype])


def trace_samples(info: Any, dtype: Any, count: int) -> Iterator[Case]:
    """The operator on samples, and its form in place on those that have room for the result."""
    torch.manual_seed(0)
    has_oracle = dtype is not torch.bfloat16 or info.name not in BY_DIFFERENCE
    with_gradient = info.supports_autograd and dtype in info.backward_dtypes and has_oracle
    samples = itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=with_gradient), 60)
    for number, sample in enumerate(spread([each for each in samples if _is_dense(each)], count)):
        forms = [(info.op, with_gradient)]
        if info.inplace_variant is not None and not sample.broadcasts_input:
            forms.append((info.inplace_variant, with_gradient and info.supports_inplace_autograd))
        for operator, has_gradient in forms:
            title = f"{getattr(operator, '__name__', info.name)} {info.variant_test_name} on sample {number}"
            try:
                yield trace_sample(operator, sample, with_gradient=has_gradient, title=title)
            except UnsupportedProgramError as error:
                if not any(refusal in error.message for refusal in REFUSALS):
                    raise


def _is_dense(sample: Any) -> bool:
    """Whether shapes say all: tensors are strided and have elements, no index is a mask, and nothing is random."""
    tensors = [
        v for v in _pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(v, torch.Tensor)
    ]
    indices = sample.args[0] if sample.args and isinstance(sample.args[0], tuple) else ()
    return (
        all(v.layout is torch.strided and v.numel() for v in tensors)
        and not any(isinstance(v, torch.Tensor) and v.dtype is torch.bool for v in indices)
        and not {"sparse", "reduce"} & sample.kwargs.keys()
        and not sample.kwargs.get("dropout_p")
    )


def trace_sample(operator: Any, sample: Any, *, with_gradient: bool, title: str) -> Case:
    leaves, tree = _pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(inputs: list[Any]) -> Any:
        filled = list(leaves)
        for place, value in zip(places, inputs, strict=True):
            filled[place] = value.clone()  # so that operators in place leave the leaf
        first, args, kwargs = _pytree.tree_unflatten(filled, tree)
        return operator(first, *args, **kwargs)

    inputs = [leaves[n].detach().contiguous() for n in places]
    differentiable = [with_gradient and leaves[n].requires_grad for n in places]
    wanted = forward_and_backward(call, inputs, differentiable)
    graph = trace(
        lambda values: forward_and_backward(call, values, differentiable),
        [TensorType(tuple(v.shape), v.dtype) for v in inputs],
        state_count=0, model=torch.nn.Identity(), optimizers=[], name=title,
    )  # fmt: skip
    return Case(title, graph, inputs, wanted)


def compare(cases: list[Case], *, bounds: tuple[float, float]) -> None:
    """All cases, as one program."""

    def run(values: list[list[Any]]) -> list[Any]:
        return [evaluate(case.graph, inputs) for case, inputs in zip(cases, values, strict=True)]

    with jax.enable_x64(True):
        results = jax.jit(run)([[to_numpy(value) for value in case.inputs] for case in cases])
    rtol, atol = bounds
    for case, found in zip(cases, results, strict=True):
        for here, there in zip(found, case.wanted, strict=True):
            largest = max(map(_largest, [there, *case.inputs]))
            torch.testing.assert_close(
                to_tensor(np.asarray(here)), there, rtol=rtol, atol=atol * max(1, largest), equal_nan=True,
                msg=lambda text, title=case.title: f"{title}: {text}",
            )  # fmt: skip


def evaluate(graph: Graph, inputs: list[Any]) -> tuple[Any, ...]:
    constants = {key: to_numpy(value) for key, value in graph.constants.items()}
    return tuple(Evaluation(graph.nodes, constants, jax.random.key(0)).run(inputs))


def _largest(value: Any) -> float:
    """The largest finite absolute value."""
    return value.abs().nan_to_num(posinf=0).max().item() if value.is_floating_point() and value.numel() else 0.0
