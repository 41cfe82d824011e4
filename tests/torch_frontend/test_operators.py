"""Lowerings beside eager PyTorch on PyTorch's own samples of each operator, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree

from shardwright.client.frontends.torch.dtypes import to_numpy, to_tensor
from shardwright.client.frontends.torch.evaluation import Evaluation
from shardwright.client.frontends.torch.tracing import Graph, TensorType, trace
from shardwright.errors import UnsupportedProgramError
from tests.torch_frontend.models import floats

methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")

pytestmark = pytest.mark.dear

#: Samples of an operator, spread over PyTorch's and divided among its variants; each variant has a few.
SAMPLES = 20
LEAST_OF_A_VARIANT = 3

OPERATORS = """
_upsample_bilinear2d_aa abs acos acosh add addbmm addcdiv addcmul addmm addmv all amax amin any arange argmax argmin
argsort as_strided_scatter asin asinh atan atan2 atanh baddbmm bmm bucketize cat cdist ceil cholesky cholesky_inverse
cholesky_solve clamp clamp_max clamp_min clone complex constant_pad_nd contiguous copysign cos cosh count_nonzero
cummax cummin cumprod cumsum diag_embed diagonal diagonal_scatter diff digamma div dot einsum eq erf erfc erfinv exp
exp2 expand expm1 eye fft.fft fft.ifft fft.ihfft fft.ihfft2 fft.ihfftn fft.irfft fft.rfft fill flip floor floor_divide
fmax fmin fmod frac frexp full full_like gather gcd ge gt histc hypot i0 igamma igammac index_add index_copy
index_fill index_put index_reduce index_select isfinite isinf isnan kthvalue lcm le lerp lgamma linalg.cholesky
linalg.det linalg.eigvalsh linalg.householder_product linalg.inv linalg.lu linalg.lu_factor_ex linalg.lu_solve
linalg.pinv linalg.slogdet linalg.solve linspace log log10 log1p log2 log_softmax logaddexp logcumsumexp logdet
logical_and logical_not logical_or logsumexp lt lu_unpack masked_fill masked_scatter masked_select matmul matrix_exp
max maximum mean median min minimum mm mul mv nan_to_num nansum native_batch_norm native_layer_norm ne neg new_full
new_zeros nn.functional.adaptive_avg_pool2d nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d
nn.functional.adaptive_max_pool3d nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.bilinear
nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits nn.functional.conv1d
nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose2d nn.functional.cosine_similarity
nn.functional.cross_entropy nn.functional.elu nn.functional.embedding nn.functional.embedding_bag nn.functional.gelu
nn.functional.glu nn.functional.grid_sample nn.functional.group_norm nn.functional.hardshrink
nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.huber_loss
nn.functional.instance_norm nn.functional.interpolate nn.functional.kl_div nn.functional.layer_norm
nn.functional.leaky_relu nn.functional.linear nn.functional.logsigmoid nn.functional.max_pool2d nn.functional.mish
nn.functional.mse_loss nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss nn.functional.nll_loss
nn.functional.normalize nn.functional.pad nn.functional.pdist nn.functional.pixel_shuffle nn.functional.prelu
nn.functional.relu nn.functional.relu6 nn.functional.rms_norm nn.functional.scaled_dot_product_attention
nn.functional.selu nn.functional.silu nn.functional.smooth_l1_loss nn.functional.softmin nn.functional.softplus
nn.functional.softshrink nn.functional.unfold nn.functional.upsample_bilinear nn.functional.upsample_nearest ones_like
outer permute pinverse polar polygamma pow prod put reciprocal remainder repeat repeat_interleave reshape roll round
rsqrt rsub scatter scatter_add scatter_reduce searchsorted select select_scatter sgn sigmoid sign signbit sin sinh
slice slice_scatter softmax sort special.i0e special.i1 special.i1e special.log_ndtr special.ndtri special.zeta split
sqrt square squeeze stack std sub sum t take tan tanh tile topk transpose triangular_solve tril triu trunc unbind
unfold unsqueeze var var_mean view view_as_complex where xlogy zeros_like
""".split()  # noqa: SIM905

#: Relative error, and absolute error of results up to 1, by element type.
BOUNDS = {torch.float32: (2e-4, 1e-5), torch.bfloat16: (2**-5, 2**-5), torch.int64: (0.0, 0.0)}

#: Samples whose shape, or whose choice, depends on values; or arguments that no training step has.
WITHOUT = {
    "masked_select": "the result's size depends on values",
}


#: What is refused: sizes by values.
REFUSALS = ("size depends on values", "aten.repeat_interleave.Tensor")

#: Operators of order: among equal elements, which bfloat16 has many of, each implementation has its own.
BY_ORDER = ("argsort", "cummax", "cummin", "median", "sort", "topk")

#: Operators whose places between elements, or steps of a series, eager bfloat16 rounds.
BY_ROUNDING = ("histc", "matrix_exp", "nn.functional.grid_sample")

#: Operators whose gradient is a small sum of large numbers: eager bfloat16 is no oracle.
BY_DIFFERENCE = ("addcmul", "nn.functional.normalize")


def infos(name: str) -> list[Any]:
    """Variants of one operator, e.g. pads by mode."""
    return [info for info in methods.op_db if info.name == name]


def test_every_operator_is_known() -> None:
    assert [name for name in OPERATORS if not infos(name)] == []


def weighted(value: Any) -> Any:
    """Σ w x, with weights from ½ to 3⁄2 by position."""
    flat = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).reshape(-1)
    return (flat * torch.linspace(0.5, 1.5, flat.numel()).to(flat.dtype)).sum()


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


def types_of(name: str) -> list[Any]:
    """The element types in which an operator is tested: floats, of which eager PyTorch is an oracle, else integers."""
    wanted = [torch.float32] if name in BY_ORDER + BY_ROUNDING else [torch.float32, torch.bfloat16]
    dtypes = [dtype for dtype in wanted if any(dtype in info.dtypes for info in infos(name))]
    return dtypes or [torch.int64]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in OPERATORS if name not in WITHOUT for dtype in types_of(name)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_operator(name: str, dtype: Any) -> None:
    variants = [info for info in infos(name) if dtype in info.dtypes]
    count = max(SAMPLES // len(variants), LEAST_OF_A_VARIANT)
    cases = [case for info in variants for case in trace_samples(info, dtype, count)]
    assert cases
    compare(cases, bounds=BOUNDS[dtype])


@dataclass
class Sample:
    input: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize("part", ["real", "imag", "conj", "view_as_real"])
def test_updates_through_a_view_of_complex_numbers(part: str) -> None:
    def update(x: Any) -> Any:
        view = torch.view_as_real(x)[..., 1] if part == "view_as_real" else getattr(x, part)
        (view() if callable(view) else view).mul_(3)
        return x.sin()

    sample = Sample(torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))
    compare([trace_sample(update, sample, with_gradient=False, title=part)], bounds=BOUNDS[torch.float32])


def test_numbers_keep_their_digits_beside_bfloat16() -> None:
    """PyTorch computes with them in float32."""

    def update(x: Any, y: Any) -> Any:
        return x * 0.99, x / 0.997, x.clone().mul_(0.99), x * y.float().sum()

    x, y = (floats(1000, seed=n).to(torch.bfloat16) for n in range(2))
    case = trace_sample(update, Sample(x, (y,)), with_gradient=False, title="numbers")
    assert (case.wanted[0] != x * torch.tensor(0.99, dtype=torch.bfloat16)).any()
    compare([case], bounds=(0.0, 0.0))


def exponential_by_eigenvalues(x: Any) -> Any:
    values, vectors = torch.linalg.eigh(x @ x.mT)
    return (vectors * values.exp()) @ vectors.mT


def inverse_root_by_singular_values(x: Any) -> Any:
    left, values, right = torch.linalg.svd(x)
    return (left / values.sqrt()) @ right


@pytest.mark.parametrize("function", [exponential_by_eigenvalues, inverse_root_by_singular_values])
def test_factors_whose_signs_are_free(function: Any) -> None:
    sample = Sample((floats(4, 4) / 4 + torch.eye(4)).requires_grad_())
    compare([trace_sample(function, sample, with_gradient=True, title=function.__name__)], bounds=(1e-4, 1e-5))


def test_loss_of_variances() -> None:
    """PyTorch's own looks for variances below 0."""
    mean, target, var = (floats(6, 4, seed=n).requires_grad_() for n in range(3))
    loss = lambda mean, target, var: F.gaussian_nll_loss(mean, target, var.exp(), full=True)  # noqa: E731
    case = trace_sample(loss, Sample(mean, (target, var)), with_gradient=True, title="gaussian_nll_loss")
    assert len(case.wanted) == 4
    compare([case], bounds=BOUNDS[torch.float32])


def trace_samples(info: Any, dtype: Any, count: int) -> Iterator[Case]:
    """The operator on samples, and its form in place on those that have room for the result."""
    torch.manual_seed(0)
    has_oracle = dtype is not torch.bfloat16 or info.name not in BY_DIFFERENCE
    with_gradient = info.supports_autograd and dtype in info.backward_dtypes and has_oracle
    samples = filter(_is_dense, info.sample_inputs("cpu", dtype, requires_grad=with_gradient))
    for number, sample in enumerate(spread(list(itertools.islice(samples, 60)), count)):
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
