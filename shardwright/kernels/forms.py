"""Kernels as they look for each part of their arrays.

A kernel is compiled for the sizes of its arrays, so that a device's part of it is another kernel. Its call in the text,
`custom-call(…), custom_call_target="shardwright.kernel"`, holds a program for each part that a plan may ask for, under
the dimensions of the part's operands: packed into its configuration, because the text alone has to suffice.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shardwright.hlo import Instruction
from shardwright.kernels.prices import Price, parse_price
from shardwright.kernels.rules import Shapes
from shardwright.tuning import MAX_FORMS_BYTES

#: The target of such calls, and the frontend attribute that holds the name of the kernel's function.
KERNEL_TARGET = "shardwright.kernel"
NAME_ATTRIBUTE = "shardwright.kernel_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """A kernel for operands of some sizes.

    hlo_text: a module that takes the operands and gives the results. price: what the kernel says that it costs.
    """

    hlo_text: str
    price: Price | None = None


#: A kernel's forms, by the dimensions of their operands.
KernelForms = Mapping[Shapes, KernelForm]


def encode_forms(forms: KernelForms) -> str:
    """The configuration of a call; `decode_forms` reads it."""
    rows = [[shapes, form.hlo_text, form.price.to_text() if form.price else ""] for shapes, form in forms.items()]
    return base64.b64encode(zlib.compress(json.dumps(rows).encode(), 9)).decode()


@lru_cache(maxsize=1 << 8)
def decode_forms(config: str) -> KernelForms | None:
    """The forms in a call's configuration; None when it is none."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(config, validate=True), MAX_FORMS_BYTES)
        if not unpacker.eof:
            return None
        return {
            tuple(tuple(map(int, shape)) for shape in shapes): KernelForm(
                hlo_text=str(text), price=parse_price(price) if price else None
            )
            for shapes, text, price in json.loads(data)
        }
    except (binascii.Error, zlib.error, TypeError, ValueError, AttributeError, RecursionError):
        return None


def read_forms(instruction: Instruction) -> KernelForms | None:
    """The forms of a kernel's call; None of any other instruction."""
    if instruction.get("custom_call_target") != KERNEL_TARGET:
        return None
    return decode_forms(instruction.get("backend_config") or "")
