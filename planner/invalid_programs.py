"""Error messages for programs that planning cannot make sense of.

Texts are read without shape inference: an inconsistent one may raise an IndexError deep in the search. XLA then judges
whether the program is valid, in a child process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import InternalError, PlanError, ShardwrightError
from shardwright.xla.referee import refusal_of


@contextmanager
def raise_typed_errors(hlo_text: str) -> Iterator[None]:
    """Turns a foreign exception into PlanError when XLA refuses the program too, else into InternalError."""
    try:
        yield
    except ShardwrightError:
        raise
    except Exception as error:
        refusal = refusal_of(hlo_text)
        if refusal is None:
            raise InternalError(
                f"planning failed: {type(error).__name__}: {error}",
                where=_module_name(hlo_text),
                remedy="please report this with the HLO text; force= or mesh= may avoid it until then",
            ) from error
        raise PlanError(
            f"this is no valid program: {refusal}",
            where=_module_name(hlo_text),
            remedy="give the text as the framework printed it, unchanged",
        ) from error


def _module_name(hlo_text: str) -> str:
    first = hlo_text.lstrip().partition("\n")[0]
    return first.partition(",")[0][:80]
