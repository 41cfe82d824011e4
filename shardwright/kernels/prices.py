"""What a custom call costs, where its author says so.

In the text, a frontend attribute of the call, `shardwright.cost="flops=2e9,bytes=3e6,source=sw.cost"`: written by
`shardwright.cost`, or of the `cost_estimate` of a Pallas kernel. Calls of TPU kernels hold theirs in their
configuration (jax 0.10.2 to 0.12.0, `custom_call_config`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite

from shardwright.hlo import Instruction

#: The frontend attribute that holds a price.
PRICE_ATTRIBUTE = "shardwright.cost"

#: Who may have said a price: the user, or the kernel.
BY_USER, BY_KERNEL = "sw.cost", "cost_estimate"

_TPU_TARGET = "tpu_custom_call"
_TPU_ESTIMATE = re.compile(r'"cost_estimate":\s*(\{[^{}]*\})')


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Of one run of a call.

    flops: multiply-adds count as two. size_bytes: read and written; None: its operands and results, each once.
    transcendentals: exponentials and the like, beside `flops`. source: `BY_USER` or `BY_KERNEL`.
    """

    flops: float
    size_bytes: float | None = None
    transcendentals: float = 0.0
    source: str = BY_USER

    def divide(self, parts: float) -> Price:
        """That of one of equal parts."""
        size_bytes = None if self.size_bytes is None else self.size_bytes / parts
        return replace(
            self, flops=self.flops / parts, size_bytes=size_bytes, transcendentals=self.transcendentals / parts
        )

    def to_text(self) -> str:
        """The attribute's value; `parse_price` reads it."""
        size = "" if self.size_bytes is None else f"bytes={self.size_bytes!r},"
        more = f"transcendentals={self.transcendentals!r}," if self.transcendentals else ""
        return f"flops={self.flops!r},{size}{more}source={self.source}"


@lru_cache(maxsize=1 << 10)
def parse_price(text: str) -> Price | None:
    """The price in an attribute's value; None when it is none."""
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        numbers = {name: float(value) for name, value in fields.items() if name != "source"}
    except ValueError:
        return None
    if "flops" not in numbers or not all(isfinite(number) and number >= 0 for number in numbers.values()):
        return None
    return Price(
        flops=numbers["flops"],
        size_bytes=numbers.get("bytes"),
        transcendentals=numbers.get("transcendentals", 0.0),
        source=BY_KERNEL if fields.get("source") == BY_KERNEL else BY_USER,
    )


def read_price(instruction: Instruction) -> Price | None:
    """What a custom call says that it costs, whole; None where it says nothing."""
    text = instruction.get("frontend_attributes", {}).get(PRICE_ATTRIBUTE)
    if text is not None:
        return parse_price(text)
    if instruction.get("custom_call_target") == _TPU_TARGET:
        return _parse_tpu_config(instruction.get("backend_config") or "")
    return None


@lru_cache(maxsize=1 << 8)
def _parse_tpu_config(config: str) -> Price | None:
    match = _TPU_ESTIMATE.search(config)
    try:
        fields = json.loads(match[1]) if match else {}
        return Price(
            flops=float(fields["flops"]),
            size_bytes=float(fields["bytes_accessed"]),
            transcendentals=float(fields.get("transcendentals", 0)),
            source=BY_KERNEL,
        )
    except (KeyError, TypeError, ValueError):
        return None
