"""What a step cannot be traced with, in words: what it is, its line, and what to write instead."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from shardwright.client.frontends.torch.evaluation import base_name
from shardwright.client.frontends.torch.labels import is_user_file
from shardwright.errors import ArgumentError, ShardwrightError, UnsupportedProgramError

#: What makes a tensor whose size depends on values, by the operator's name: what to write instead.
_SIZES = {
    "nonzero": "keep all elements and weight them: torch.where(mask, x, 0).sum(); mask.sum() is their number",
    "index": "reduce what the mask selects at once, x[mask].mean(), or keep all: torch.where(mask, x, 0)",
    "masked_select": "reduce what the mask selects at once, x[mask].mean(), or keep all: torch.where(mask, x, 0)",
    "_unique2": "find the distinct values in the data loader, and pass them padded to one length",
    "unique_dim": "find the distinct values in the data loader, and pass them padded to one length",
    "unique_consecutive": "find the runs in the data loader, and pass them padded to one length",
    "bincount": "say how many values there are: torch.bincount(x, minlength=n)",
    "repeat_interleave": "say how long the result is: torch.repeat_interleave(x, repeats, output_size=n), or pass it "
    "repeated",
    "_pack_padded_sequence": "pass the padded tensor to the layer, with a mask of the places that count",
}
_OTHER_SIZE = "make it of its largest size, with a mask of what counts; or make it in the data loader and pass it"


#: What libraries raise of what they cannot take.
_OF_PYTORCH = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError, AssertionError)

#: What PyTorch says of shapes and types that do not fit, eagerly as well.
_OF_ARGUMENTS = (
    "must match", "shape", "size of tensor", "Expected dtype", "expected dtype", "out of range", "dtype", "same dtype",
    "mat1", "Expected input batch_size", "not broadcastable", "Sizes of tensors", "Dimension",
)  # fmt: skip


@contextlib.contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Explain errors of tracing that come from values; those of the user's code come through."""
    try:
        yield
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        raise UnsupportedProgramError(
            f"{name} decides by a value that only the servers know",
            where=_user_line(error),
            remedy=_decision_remedy(error),
        ) from error
    except DynamicOutputShapeException as error:
        raise UnsupportedProgramError(
            f"{name} makes a tensor whose size depends on values ({error.func})",
            where=_user_line(error),
            remedy=_SIZES.get(base_name(error.func), _OTHER_SIZE),
        ) from error
    except UnsupportedOperatorException as error:
        raise UnsupportedProgramError(
            f"{name} uses {error.func}, whose shapes PyTorch does not know without running it",
            where=_user_line(error),
            remedy="register a fake kernel for it, or use another operator",
        ) from error
    except ShardwrightError:
        raise
    except _OF_PYTORCH as error:
        if not _is_of_pytorch(error):
            raise
        raise _explain(error, name) from error


def _is_of_pytorch(error: BaseException) -> bool:
    """Whether a library raised it, and not the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not is_user_file(frames[-1].filename) and _last_user_frame(error) is not None


def _explain(error: BaseException, name: str) -> ShardwrightError:
    text = str(error).strip().split("\n")[0]
    if any(word in text for word in _OF_ARGUMENTS):
        return ArgumentError(
            f"{name} does not fit its batch: {text}",
            where=_user_line(error),
            remedy="eager PyTorch says the same of this batch: look at the shapes and dtypes in this line",
        )
    if "nested" in text or "Nested" in text:
        remedy = "pass the padded tensor and the lengths, and weight what counts: a program's sizes are fixed"
    elif "HigherOrderOperator" in text:
        remedy = "write it in Python: loops are written out, and torch.where chooses"
    else:
        remedy = (
            "run the step eagerly on this batch: if it fails there, the error is PyTorch's; if not, write this line "
            "with other functions"
        )
    return UnsupportedProgramError(
        f"{name} cannot be traced: {type(error).__name__}: {text}", where=_user_line(error), remedy=remedy
    )


def _decision_remedy(error: BaseException) -> str:
    """By the innermost functions that led there, and by the user's line."""
    frames = traceback.extract_tb(error.__traceback__)
    if any("/torch/distributions/" in frame.filename for frame in frames):
        return "make the distribution with validate_args=False: its checks decide by values"
    names = {frame.name for frame in frames if not is_user_file(frame.filename)}
    if "pack_padded_sequence" in names:
        return _SIZES["_pack_padded_sequence"]
    if "bincount" in names:
        return _SIZES["bincount"]
    line = _last_user_frame(error)
    text = (line.line if line is not None else "") or ""
    if text.startswith(("if ", "elif ", "assert ", "while ")) or " if " in text:
        return "compute both sides and choose: torch.where(condition, a, b); or decide by a number that is passed"
    if text.startswith("for ") or "range(" in text:
        return "loop to the largest number, with torch.where or a mask for what counts; or pass the number"
    if any(word in text for word in (".item()", "float(", "int(", "bool(", ".tolist()", ".numpy()")):
        return "keep the tensor and compute with it; return it to read it after the call"
    return "keep it in tensors, and choose by torch.where; or compute it before the step and pass it"


def _last_user_frame(error: BaseException) -> Any:
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if is_user_file(frame.filename)), None)


def _user_line(error: BaseException) -> str:
    frame = _last_user_frame(error)
    return f"{frame.filename}:{frame.lineno} ({frame.name})" if frame is not None else ""
