"""Checks by values in a step's Python code, `assert x.isfinite().all()` or `if bad.any(): raise …`, on servers.

The trace goes on as if they held. Where one does not, the step changes nothing, and what reads its results, or a later
call, raises a CheckError.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import logging
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import constraints

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.evaluation import is_check
from shardwright.client.frontends.torch.labels import Label, is_user_file
from shardwright.client.limits import MOST_PENDING_CHECKS
from shardwright.errors import CheckError

_log = logging.getLogger("shardwright")

_DISTRIBUTIONS = "/torch/distributions/"


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a program. text: what was asked for. place: the user's line."""

    text: str
    place: str


def list_checks(graph: Any) -> tuple[Check, ...]:
    """Checks of a traced graph, in order."""
    return tuple(
        Check(str(node.args[1]), node.meta.get("label", Label()).place) for node in graph.nodes if is_check(node)
    )


def require(condition: Any, text: str) -> None:
    """While a step is traced: its servers check that all of a condition is true."""
    torch._assert_async(condition.all(), text)


@contextlib.contextmanager
def take_checks() -> Iterator[None]:
    """While a step is traced: what only a check asks for is as it has to be. Functions of torch leave modes."""
    definite = type(constraints.positive_definite)
    with (
        mock.patch.object(FakeTensor, "__bool__", _truth_of_tensor, create=True),
        mock.patch.object(definite, "check", _is_positive_definite),
    ):
        yield


def _is_positive_definite(constraint: Any, value: Any) -> Any:
    """As PyTorch's, which looks only at symmetric ones whether they are."""
    del constraint
    return constraints.symmetric.check(value) & (torch.linalg.cholesky_ex(value).info == 0)


def _truth_of_tensor(tensor: Any) -> bool:
    expected = _answer(tensor)
    return torch.Tensor.__bool__(tensor) if expected is None else expected


def _answer(condition: Any) -> bool | None:
    """The truth value of a tensor that only a check asks for; None: it decides about more than an error."""
    frame = _frame_that_asks()
    if frame is None or condition.numel() != 1:
        return None
    source = _source_of(frame)
    expected = _expected_truth(frame, *source) if source is not None else None
    if expected is not None:
        holds = condition if condition.dtype is torch.bool else condition != 0
        require(holds if expected else ~holds, _text_of(frame))
    return expected


def _frame_that_asks() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame


def _source_of(frame: FrameType) -> tuple[Any, int] | None:
    """(the innermost `if` or `assert` of a frame's line, lines of the file before its function)."""
    file, first = frame.f_code.co_filename, frame.f_code.co_firstlineno - 1
    tree = _parse(file, first) if linecache.getlines(file) else None
    around = [
        node for node in ast.walk(tree or ast.Module([], []))
        if isinstance(node, ast.If | ast.Assert)
        and node.test.lineno <= frame.f_lineno - first <= (node.test.end_lineno or 0)
    ]  # fmt: skip
    return (around[-1], first) if around else None


@functools.lru_cache(maxsize=256)
def _parse(file: str, first: int) -> Any:
    """The function that begins behind so many lines of a file."""
    lines = inspect.getblock(linecache.getlines(file)[first:])
    try:
        return ast.parse(textwrap.dedent("".join(lines)))
    except SyntaxError:  # a lambda in the middle of an expression
        return None


def _expected_truth(frame: FrameType, statement: Any, first: int) -> bool | None:
    """What the tensor that is asked for has to be, so that nothing is raised."""
    if isinstance(statement, ast.If) and not (len(statement.body) == 1 and isinstance(statement.body[0], ast.Raise)):
        return None
    block = linecache.getline(frame.f_code.co_filename, first + 1)
    indent = len(block) - len(block.lstrip())
    number = frame.f_lasti // 2
    # Before Python 3.12 a jump has its statement's position: what it jumps by is computed right before it.
    for positions in list(frame.f_code.co_positions())[number - 1 : number + 1]:
        if None not in positions:
            line, end_line, column, end_column = positions
            at = (line - first, end_line - first, column - indent, end_column - indent)  # type: ignore[operator]
            truth = _truth_of(statement.test, at, is_true=isinstance(statement, ast.Assert))
            if truth is not None:
                return truth
    # Asserts that pytest has written anew have other positions.
    parts = ast.BoolOp | ast.UnaryOp | ast.IfExp
    is_plain = isinstance(statement, ast.Assert) and not any(isinstance(n, parts) for n in ast.walk(statement.test))
    return True if is_plain else None


def _truth_of(test: Any, at: tuple[int, ...], *, is_true: bool) -> bool | None:
    """What a part of a condition has to be for the whole to be `is_true`; None: it does not follow."""
    if (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) == at:
        return is_true
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth_of(test.operand, at, is_true=not is_true)
    if isinstance(test, ast.BoolOp):
        # All parts of a true `and`, and of a false `or`, are alike; else the last has to decide.
        is_alike = isinstance(test.op, ast.And) == is_true
        for part in test.values if is_alike else test.values[-1:]:
            truth = _truth_of(part, at, is_true=is_true)
            if truth is not None:
                return truth
    return None


def _text_of(frame: FrameType) -> str:
    code = frame.f_code
    if _DISTRIBUTIONS in code.co_filename:
        owner, what = frame.f_locals.get("self"), frame.f_locals.get("param", "a value")
        return f"{what} of {type(owner).__name__} has values that its constraint does not allow"
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return line if is_user_file(code.co_filename) else f"{code.co_qualname}: {line}"


class Outcome:
    """The number of the first check of one call that did not hold, or -1, on the servers."""

    def __init__(self, handle: RemoteArray, checks: Sequence[Check]) -> None:
        handle.copy_to_host_async()
        self._handle: RemoteArray | None = handle
        self._checks = checks
        self._error: CheckError | None = None

    def require(self) -> None:
        """Waits for it; raises CheckError where one did not hold."""
        if self._handle is not None:
            number, self._handle = int(np.asarray(self._handle)), None
            if number >= 0:
                check = self._checks[number]
                self._error = CheckError(
                    f"a check of the step did not hold: {check.text}",
                    where=check.place,
                    remedy="the step has changed nothing; look at its batch, or at the state before it",
                )
        if self._error is not None:
            raise self._error


class Outcomes:
    """Those of calls whose results nobody has read."""

    def __init__(self) -> None:
        self._pending: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """One more; where they are many, all are waited for."""
        self._pending.append(outcome)
        if len(self._pending) >= MOST_PENDING_CHECKS:
            self.require()

    def require(self) -> None:
        """Raises the first CheckError of those pending."""
        while self._pending:
            self._pending.pop(0).require()

    def tell(self) -> None:
        """At the end of a session: an error that nobody has seen."""
        try:
            self.require()
        except CheckError as error:
            _log.error("%s", error)
