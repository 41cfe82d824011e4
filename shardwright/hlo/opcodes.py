"""Names of HLO opcodes, how many operands each takes, and the attributes it cannot be without."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: What devices do together, each named by its synchronous form.
COLLECTIVES = frozenset(
    _words("""
    all-gather all-reduce all-to-all collective-broadcast collective-permute collective-reduce ragged-all-to-all
    reduce-scatter
""")
)

#: What says which device runs the program.
DEVICE_NUMBERS = frozenset({"partition-id", "replica-id"})


_UNARY = _words("""
    abs acos acosh all-gather-done all-reduce-done asin asinh async-done async-update atanh bitcast bitcast-convert
    broadcast cbrt ceil cholesky collective-permute-done convert copy copy-done copy-start cosine cosh
    count-leading-zeros domain erf exp2 exponential exponential-minus-one fft floor get-dimension-size get-tuple-element
    imag infeed is-finite log log-plus-one log2 logistic negate not opt-barrier popcnt real recv recv-done
    reduce-precision reshape reverse rng-bit-generator round-nearest-afz round-nearest-even rsqrt send-done shuffle sign
    sine sinh slice sqrt tan tanh topk transpose while
""")

_BINARY = _words("""
    add add-dependency and atan2 compare complex convolution divide dot gather maximum minimum mulhi multiply or
    outfeed pad power remainder send set-dimension-size shift-left shift-right-arithmetic shift-right-logical
    stochastic-convert subtract triangular-solve xor
""")

_OTHER_ARITY = {
    "batch-norm-grad": 5,
    "batch-norm-inference": 5,
    "batch-norm-training": 3,
    "clamp": 3,
    "iota": 0,
    "partition-id": 0,
    "ragged-all-to-all": 6,
    "ragged-dot": 3,
    "replica-id": 0,
    "rng-get-and-update-state": 0,
    "scaled-dot": 4,
    "select": 3,
    "select-and-scatter": 3,
}

_VARIADIC = _words("""
    after-all all-gather all-gather-start all-reduce all-reduce-start all-to-all async-start call
    collective-broadcast collective-permute collective-permute-start collective-reduce concatenate conditional
    constant custom-call dynamic-reshape dynamic-slice dynamic-update-slice fusion map parameter reduce
    reduce-scatter reduce-window rng scan scatter sort tuple
""")

#: Opcodes with a fixed number of operands.
ARITY: dict[str, int] = {**dict.fromkeys(_UNARY, 1), **dict.fromkeys(_BINARY, 2), **_OTHER_ARITY}

#: Every opcode that XLA prints.
OPCODES: frozenset[str] = frozenset([*ARITY, *_VARIADIC])

#: Attributes without which XLA does not read an instruction.
REQUIRED: dict[str, tuple[str, ...]] = {
    opcode: _words(names)
    for opcode, names in {
        "all-gather": "dimensions",
        "all-gather-start": "dimensions",
        "all-reduce": "to_apply",
        "all-reduce-start": "to_apply",
        "async-start": "calls",
        "batch-norm-grad": "epsilon feature_index",
        "batch-norm-inference": "epsilon feature_index",
        "batch-norm-training": "epsilon feature_index",
        "call": "to_apply",
        "collective-permute": "source_target_pairs",
        "collective-permute-start": "source_target_pairs",
        "compare": "direction",
        "concatenate": "dimensions",
        "convolution": "dim_labels",
        "custom-call": "custom_call_target",
        "domain": "domain",
        "dynamic-slice": "dynamic_slice_sizes",
        "fft": "fft_type fft_length",
        "fusion": "calls kind",
        "gather": "offset_dims collapsed_slice_dims start_index_map index_vector_dim slice_sizes",
        "get-dimension-size": "dimensions",
        "get-tuple-element": "index",
        "iota": "iota_dimension",
        "map": "to_apply",
        "pad": "padding",
        "reduce": "dimensions to_apply",
        "reduce-precision": "exponent_bits mantissa_bits",
        "reduce-scatter": "dimensions to_apply",
        "reduce-window": "to_apply",
        "reverse": "dimensions",
        "rng": "distribution",
        "rng-bit-generator": "algorithm",
        "rng-get-and-update-state": "delta",
        "scan": "to_apply dimensions num_carries",
        "scatter": "update_window_dims inserted_window_dims scatter_dims_to_operand_dims index_vector_dim to_apply",
        "select-and-scatter": "select scatter",
        "set-dimension-size": "dimensions",
        "slice": "slice",
        "sort": "dimensions to_apply",
        "topk": "k",
        "transpose": "dimensions",
        "while": "condition body",
    }.items()
}

_ASYNC_SUFFIXES = ("-start", "-update", "-done")


def is_opcode(text: str) -> bool:
    """Whether XLA's parser knows this opcode, its short forms for asynchronous calls included.

    `call-start`, `call-update` and `call-done` stand for `async-start`, … around a `call`.
    """
    return text in OPCODES or any(
        text.endswith(suffix) and text[: -len(suffix)] in OPCODES for suffix in _ASYNC_SUFFIXES
    )
