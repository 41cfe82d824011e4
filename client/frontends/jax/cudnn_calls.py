"""Calls of cuDNN's attention in programs for devices without it."""

from __future__ import annotations

from shardwright.attention import read_call
from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import parse

#: How targets of such calls begin, in the text.
_PREFIX = '"__cudnn$fmha'


def refuse_calls_of_cudnn(text: str, name: str, platform: str) -> None:
    """Raises UnsupportedProgramError where a program calls attention of cuDNN's that nothing else computes; other
    attention is written out on devices without cuDNN."""
    if _PREFIX not in text:
        return
    module = parse(text)
    calls = [
        instruction
        for instruction in module.instructions()
        if instruction.get("custom_call_target", "").startswith(_PREFIX[1:])
        and ((call := read_call(instruction)) is None or call.is_f8)
    ]
    if calls:
        raise UnsupportedProgramError(
            f"{name} asks {platform!r} devices for attention that cuDNN alone computes: in 8-bit floats, or of packed "
            "or paged sequences",
            where=module.place(calls[0]),
            remedy='leave implementation="cudnn" out, or write jax.nn.dot_product_attention without these',
        )
