"""One attention, forward or backward, as a custom call in cuDNN's form.

With q [batch, heads, rows, width], k and v [batch, kv heads, keys, width], a bias b, and a mask:

    s = scale · q kᵀ + b, hidden where the mask says so;  p = softmax(s);  out = dropout(p) v
    statistics = max(s) + log Σ exp(s − max(s)), one float32 a row
    backward: dv = pᵀ dout;  dp = dout vᵀ;  ds = p ∘ (dp − Σ p ∘ dp);  dq = scale · ds k;  dk = scale · dsᵀ q;  db = ds

Query heads share key heads in groups: head h reads key head h // (heads // kv heads). XLA:GPU runs such a call by
cuDNN; its form is that of JAX's `jax/_src/cudnn/fused_attention_stablehlo.py` (jax 0.10.2) and of XLA's
`xla/service/gpu/cublas_cudnn.h`. The same form stands for attention that was written out and recognised: then operands
may be float32, which cuDNN has no kernel for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardwright.hlo import ArrayShape, Instruction, Shape, TupleShape

#: How targets of such calls begin.
_PREFIX = "__cudnn$fmha"

#: Masks by cuDNN's names.
_MASKS = {"NO_MASK": "none", "CAUSAL": "causal", "PADDING": "padding", "PADDING_CAUSAL": "padding_causal"}
_MASK_NAMES = {mask: name for name, mask in _MASKS.items()}

#: What scores are computed in, by the element type of operands.
_ELEMENT_NAMES = {"bf16": "BF16", "f16": "F16", "f32": "BF16", "f8e4m3fn": "BF16", "f8e5m2": "BF16"}

#: A bias that hides a key, by element type: JAX's (`get_large_negative_number` there), for cuDNN is wrong where it
#: subtracts two of the lowest numbers.
HIDDEN_BIAS = {"bf16": -(2.0**41), "f32": -(2.0**41), "f16": -(2.0**15)}

#: Dimensions of each array by its role: batch, heads, key heads (k), rows (t), keys (s), width (d), width of v (e). q,
#: k, v, out and dout may have rows before heads; results always have heads first.
_DIMS = {
    "q": "bntd", "k": "bksd", "v": "bkse", "out": "bnte", "dout": "bnte", "statistics": "bnt", "bias": "bnts",
    "q_lengths": "b", "kv_lengths": "b", "dq": "bntd", "dk": "bksd", "dv": "bkse", "dbias": "bnts", "workspace": "w",
}  # fmt: skip

_ROWS_FIRST = ("q", "k", "v", "out", "dout")

#: Numbers beside operands in 8-bit floats: what they and intermediates are multiplied by, forward and backward; and the
#: largest magnitudes that a call hands out, of all its parts.
_F8_SCALES = {
    False: ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"),
    True: (
        "descale_q", "descale_k", "descale_v", "descale_o", "descale_dout", "descale_s", "descale_dp", "scale_s",
        "scale_dq", "scale_dk", "scale_dv", "scale_dp",
    ),
}  # fmt: skip
_F8_LARGEST = {False: ("amax_s", "amax_o"), True: ("amax_dq", "amax_dk", "amax_dv", "amax_dp")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """An attention call, whole or one device's part.

    backward: whether it makes the gradients of q, k and v.
    batch, heads, kv_heads, rows, keys: sizes; `width` of q and k, `value_width` of v and the output.
    element_type: of q, k, v and the output: `bf16` or `f16`, `f8e4m3fn` or `f8e5m2`, or `f32` for one that was written
        out in it.
    rows_first: whether operands lie [batch, rows, heads, width]; otherwise [batch, heads, rows, width].
    scale: of the scores.
    mask: `none`, `causal` (keys up to the row's own number), `padding` (rows and keys up to lengths), `padding_causal`.
    window: with a causal mask, keys that a row sees, itself included; 0: all.
    bias: dimensions [1 or batch, 1 or heads, rows, keys] of the bias; empty without one.
    bias_gradient: whether the backward call makes that of the bias.
    statistics: whether the forward call hands out each row's for the backward call.
    dropout_rate, seed: of the probabilities.
    """

    backward: bool
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    width: int
    value_width: int
    element_type: str
    rows_first: bool
    scale: float
    mask: str = "none"
    window: int = 0
    bias: tuple[int, ...] = ()
    bias_gradient: bool = False
    statistics: bool = True
    dropout_rate: float = 0.0
    seed: int = 42

    @property
    def has_lengths(self) -> bool:
        """Whether lengths of rows and keys are operands."""
        return self.mask in ("padding", "padding_causal")

    @property
    def is_f8(self) -> bool:
        """Whether operands are 8-bit floats, with scales beside them."""
        return self.element_type.startswith("f8")

    @property
    def is_causal(self) -> bool:
        return self.mask in ("causal", "padding_causal")

    @property
    def target(self) -> str:
        """The custom call's target."""
        bias, dropout = "ScaleBias" if self.bias else "", "Dropout" if self.dropout_rate else ""
        return f"{_PREFIX}{bias}Softmax{dropout}{'Backward' if self.backward else ''}{'F8' if self.is_f8 else ''}"

    @property
    def operands(self) -> tuple[str, ...]:
        """The roles of its operands, in order."""
        lengths = ("q_lengths", "kv_lengths") if self.has_lengths else ()
        bias = ("bias",) if self.bias else ()
        if self.is_f8:
            own = ("q", "k", "v", "out", "dout", "statistics") if self.backward else ("q", "k", "v")
            return (*own, *_F8_SCALES[self.backward])
        if self.backward:
            return ("q", "k", "v", "statistics", "dout", *bias, "out", *lengths)
        return ("q", "k", "v", *bias, *lengths)

    @property
    def results(self) -> tuple[str, ...]:
        """The roles of its results, in order."""
        largest = _F8_LARGEST[self.backward] if self.is_f8 else ()
        if self.backward:
            return ("dq", "dk", "dv", *largest, *(("dbias",) if self.bias_gradient else ()), "workspace")
        return ("out", *largest, *(("statistics",) if self.statistics else ()), "workspace")

    @property
    def operand_dims(self) -> tuple[str, ...]:
        """Per operand, a letter for each dimension: b, n (heads), k (key heads), t (rows), s (keys), d, e (widths), u
        (of one element)."""
        return tuple(self._turned(role, _dims_of(role)) for role in self.operands)

    @property
    def result_dims(self) -> tuple[str, ...]:
        """The same for each result; heads before rows."""
        return tuple(_dims_of(role) for role in self.results)

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each dimension, by its letter."""
        return {
            "b": self.batch, "n": self.heads, "k": self.kv_heads, "t": self.rows, "s": self.keys,
            "d": self.width, "e": self.value_width, "w": 0, "u": 1,
        }  # fmt: skip

    def shape(self, role: str, *, result: bool = False) -> ArrayShape:
        """The array of a role, as an operand or as a result: of its own type and dimensions, with the layout that the
        call asks for."""
        if role in ("bias", "dbias"):
            return _array(self.element_type, self.bias)
        dims = _dims_of(role) if result else self._turned(role, _dims_of(role))
        shape = [self.sizes[letter] for letter in dims]
        turned = result and self.rows_first and len(dims) == 4 and role in _DIMS
        return _array(self._type_of(role), shape, "3,1,2,0" if turned else None)

    @property
    def operand_shapes(self) -> tuple[ArrayShape, ...]:
        return tuple(self.shape(role) for role in self.operands)

    @property
    def result_shape(self) -> TupleShape:
        """The tuple of its results."""
        return TupleShape(tuple(self.shape(role, result=True) for role in self.results))

    @property
    def backend_config(self) -> str:
        """The configuration that XLA:GPU reads, JSON."""
        numbers = _dot_numbers(self.rows_first)
        names = _BACKWARD_PRODUCTS if self.backward else _FORWARD_PRODUCTS
        config: dict[str, Any] = {
            "algorithm": {
                "algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True, "workspace_size": "0",
            },
            "fmha_scale": self.scale,
            "intermediate_tensor_shape": {
                "element_type": _ELEMENT_NAMES[self.element_type],
                "dimensions": [str(size) for size in (self.batch, self.heads, self.rows, self.keys)],
                "tuple_shapes": [],
                "layout": {
                    "dim_level_types": [], "dim_unique": [], "dim_ordered": [], "minor_to_major": ["3", "2", "1", "0"],
                    "tiles": [], "element_size_in_bits": "0", "memory_space": "0",
                    "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                    "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                    "dynamic_shape_metadata_prefix_bytes": "0",
                },
                "is_dynamic_dimension": [False] * 4,
            },
            "is_flash_attention": True,
            "mask_type": _MASK_NAMES[self.mask],
            **{name: numbers[name] for name in names},
        }  # fmt: skip
        if not self.is_f8:
            config |= {"dropout_rate": self.dropout_rate, "seed": self.seed, "sliding_window_length": self.window}
            config |= {"max_seg_per_batch": 1, "is_paged_attention": False}
        return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})

    def part(self, operand_dims: Sequence[Sequence[int]]) -> AttentionCall:
        """The call whose operands have these dimensions: one device's part, or one micro-batch's."""
        sizes: dict[str, int] = {}
        for letters, dims in zip(self.operand_dims[:3], operand_dims[:3], strict=True):
            sizes |= zip(letters, dims, strict=True)
        bias = tuple(operand_dims[self.operands.index("bias")]) if self.bias else ()
        return replace(
            self, batch=sizes["b"], heads=sizes["n"], kv_heads=sizes["k"], rows=sizes["t"], keys=sizes["s"], bias=bias
        )

    def attribute_texts(self) -> dict[str, str]:
        """The attributes of its instruction, by name, as HLO text has them."""
        layouts = (
            f"{shape.element_type}[{','.join(map(str, shape.dimensions))}]{{{shape.layout}}}"
            for shape in self.operand_shapes
        )
        return {
            "custom_call_target": f'"{self.target}"',
            "operand_layout_constraints": f"{{{', '.join(layouts)}}}",
            "api_version": "API_VERSION_STATUS_RETURNING",
            "backend_config": self.backend_config,
        }

    def _turned(self, role: str, dims: str) -> str:
        return dims[0] + dims[2] + dims[1] + dims[3] if self.rows_first and role in _ROWS_FIRST else dims

    def _type_of(self, role: str) -> str:
        special = {"statistics": "f32", "q_lengths": "s32", "kv_lengths": "s32", "workspace": "u8"}
        return special.get(role, self.element_type if role in _DIMS else "f32")


def read_call(instruction: Instruction) -> AttentionCall | None:
    """The attention that a custom call makes; None for any other instruction, and for calls that are not understood:
    packed and paged sequences, slopes (ALIBI), and whatever contradicts its own shapes."""
    if instruction.opcode != "custom-call" or not instruction.get("custom_call_target", "").startswith(_PREFIX):
        return None
    leaves = tuple(leaf for operand in instruction.operands for leaf in operand.shape.leaves)
    return read_form(
        instruction.get("custom_call_target"), instruction.get("backend_config", ""), leaves, instruction.shape
    )


@lru_cache(maxsize=4096)
def read_form(target: str, config_text: str, operands: tuple[ArrayShape, ...], shape: Shape) -> AttentionCall | None:
    """The attention of a custom call with this target, configuration, operands and result; see `read_call`."""
    try:
        config = json.loads(config_text)["cudnn_fmha_backend_config"]
        call = _from_config(target, config, operands, shape)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    if call is None or call.target != target or not _agrees(call, operands, shape):
        return None
    return call


def _from_config(
    target: str, config: Mapping[str, Any], operands: Sequence[ArrayShape], shape: Shape
) -> AttentionCall | None:
    q, k, v = operands[:3]
    mask = _MASKS.get(config["mask_type"])
    packed = config.get("max_seg_per_batch", 1) > 1 or config.get("is_paged_attention", False)
    if mask is None or packed or not config.get("is_flash_attention", True):
        return None
    backward = "Backward" in target
    numbers = config["bmm2_grad_gemm2_dot_dimension_numbers" if backward else "bmm1_dot_dimension_numbers"]
    rows_first = [int(dim) for dim in numbers["lhs_batch_dimensions"]] == [0, 2]
    heads, rows = (2, 1) if rows_first else (1, 2)
    place = 5 if backward else 3
    results = len(shape.leaves) - (len(_F8_LARGEST[backward]) if q.element_type.startswith("f8") else 0)
    bias = operands[place].dimensions if "ScaleBias" in target else ()
    return AttentionCall(
        backward=backward,
        batch=q.dimensions[0],
        heads=q.dimensions[heads],
        kv_heads=k.dimensions[heads],
        rows=q.dimensions[rows],
        keys=k.dimensions[rows],
        width=q.dimensions[3],
        value_width=v.dimensions[3],
        element_type=q.element_type,
        rows_first=rows_first,
        scale=float(config["fmha_scale"]),
        mask=mask,
        window=int(config.get("sliding_window_length", 0)),
        bias=bias,
        bias_gradient=backward and results == 5,
        statistics=not backward and results == 3,
        dropout_rate=float(config.get("dropout_rate", 0.0)) if "Dropout" in target else 0.0,
        seed=int(config.get("seed", 42)),
    )


def _agrees(call: AttentionCall, operands: Sequence[ArrayShape], shape: Shape) -> bool:
    """Whether the instruction has the arrays that such a call has."""
    sizes = call.sizes
    if call.heads % max(call.kv_heads, 1) or call.element_type not in _ELEMENT_NAMES:
        return False
    if call.bias and not _is_bias(call.bias, sizes):
        return False
    expected = (*call.operand_shapes, *call.result_shape.leaves)
    arrays = (*operands, *shape.leaves)
    return [each.dimensions for each in expected] == [each.dimensions for each in arrays]


def _is_bias(dims: Sequence[int], sizes: Mapping[str, int]) -> bool:
    return (
        len(dims) == 4
        and dims[0] in (1, sizes["b"])
        and dims[1] in (1, sizes["n"])
        and tuple(dims[2:]) == (sizes["t"], sizes["s"])
    )


def _dims_of(role: str) -> str:
    return _DIMS.get(role, "uuuu")


def _array(element_type: str, dims: Sequence[int], layout: str | None = None) -> ArrayShape:
    row_major = ",".join(map(str, reversed(range(len(dims)))))
    return ArrayShape(element_type, tuple(dims), layout=row_major if layout is None else layout)


_FORWARD_PRODUCTS = ("bmm1_dot_dimension_numbers", "bmm2_dot_dimension_numbers")
_BACKWARD_PRODUCTS = (
    "bmm1_grad_gemm1_dot_dimension_numbers",
    "bmm1_grad_gemm2_dot_dimension_numbers",
    "bmm2_grad_gemm1_dot_dimension_numbers",
    "bmm2_grad_gemm2_dot_dimension_numbers",
)


@lru_cache(maxsize=2)
def _dot_numbers(rows_first: bool) -> dict[str, dict[str, list[str]]]:
    """Each product's dimensions: contracted ones of its operands, and their batch dimensions."""
    heads, rows = ("2", "1") if rows_first else ("1", "2")
    products = [
        ("3", "3", heads, heads),  # q kᵀ
        ("3", rows, "1", heads),  # p v
        ("2", rows, "1", heads),  # dsᵀ q
        ("3", rows, "1", heads),  # ds k
        ("2", rows, "1", heads),  # pᵀ dout
        ("3", "3", heads, heads),  # dout vᵀ
    ]
    return {
        name: {
            "lhs_contracting_dimensions": [left],
            "rhs_contracting_dimensions": [right],
            "lhs_batch_dimensions": ["0", left_heads],
            "rhs_batch_dimensions": ["0", right_heads],
        }
        for name, (left, right, left_heads, right_heads) in zip(
            (*_FORWARD_PRODUCTS, *_BACKWARD_PRODUCTS), products, strict=True
        )
    }
