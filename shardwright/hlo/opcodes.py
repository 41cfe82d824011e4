"""Names of HLO opcodes and how many operands each takes."""

from __future__ import annotations

_UNARY = """
abs acos acosh asin asinh atanh bitcast bitcast-convert broadcast cbrt ceil cholesky collective-permute-done
convert copy copy-done copy-start cosine cosh count-leading-zeros domain erf exponential exponential-minus-one fft floor
get-dimension-size get-tuple-element imag infeed is-finite log log-plus-one logistic negate not optimization-barrier
opt-barrier popcnt real recv recv-done reduce-precision reshape reverse rng-bit-generator round-nearest-afz
round-nearest-even rsqrt send-done sign sine sinh slice sqrt tan tanh topk transpose while
all-gather-done all-reduce-done async-update async-done
""".split()

_BINARY = """
add add-dependency and atan2 compare complex divide maximum minimum mulhi multiply or outfeed pad power
remainder send set-dimension-size shift-left shift-right-arithmetic shift-right-logical stochastic-convert
subtract triangular-solve xor convolution
""".split()

_TERNARY = "batch-norm-training clamp select select-and-scatter".split()

_VARIADIC = """
after-all all-gather all-gather-start all-reduce all-reduce-start all-to-all async-start call
collective-broadcast collective-permute collective-permute-start concatenate conditional constant custom-call dot
dynamic-reshape dynamic-slice dynamic-update-slice fusion gather iota map parameter partition-id ragged-all-to-all
ragged-dot reduce reduce-scatter reduce-window replica-id rng rng-get-and-update-state scaled-dot scan scatter sort tuple
""".split()

#: Opcodes with a fixed number of operands.
ARITY: dict[str, int] = {
    **dict.fromkeys(_UNARY, 1),
    **dict.fromkeys(_BINARY, 2),
    **dict.fromkeys(_TERNARY, 3),
    "batch-norm-grad": 5,
    "batch-norm-inference": 5,
    "gather": 2,
    "iota": 0,
    "partition-id": 0,
    "replica-id": 0,
    "rng-get-and-update-state": 0,
}

#: Every opcode that XLA prints.
OPCODES: frozenset[str] = frozenset([*ARITY, *_VARIADIC])

_ASYNC_SUFFIXES = ("-start", "-update", "-done")


def is_opcode(text: str) -> bool:
    """Whether XLA's parser knows this opcode, its short forms for asynchronous calls included.

    `call-start`, `call-update` and `call-done` stand for `async-start`, … around a `call`.
    """
    return text in OPCODES or any(
        text.endswith(suffix) and text[: -len(suffix)] in OPCODES for suffix in _ASYNC_SUFFIXES
    )
