"""Verdicts from child processes: some shardings make XLA abort its process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.planner.rules.rule_cases import Trial
from tests.planner.rules.rule_validator import Verdict, judge

_FORK = multiprocessing.get_context("fork")


class ChildDied(Exception):
    """The child ended without an answer, or with an error, which the message tells."""


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, computed in a forked process. This process must not have used JAX's devices yet."""
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_answer, args=(sender, function, arguments))
    child.start()
    sender.close()
    try:
        succeeded, answer = receiver.recv()
    except EOFError:
        succeeded, answer = False, "XLA aborted the process"
    child.join()
    if not succeeded:
        raise ChildDied(answer)
    return answer


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # XLA's stack traces
    try:
        sender.send((True, function(*arguments)))
    except Exception as error:
        sender.send((False, str(error)[:500]))
    sender.close()
    os._exit(0)


def judge_isolated(trials: Sequence[Trial], batch: int = 150) -> list[Verdict]:
    """`judge` in batches of one mesh, each in a child; a batch that fails is halved until the culprit stands alone."""
    verdicts: list[Verdict] = []
    pending = [trials[i : i + batch] for i in range(0, len(trials), batch)]
    while pending:
        group = pending.pop()
        try:
            result = in_child(lambda group: [(v.error, v.moved) for v in judge(group)], group)
        except ChildDied as error:
            if len(group) == 1:
                verdicts.append(Verdict(group[0], np.inf, crash=str(error)))
            else:
                pending += [group[: len(group) // 2], group[len(group) // 2 :]]
            continue
        verdicts += [Verdict(trial, *each) for trial, each in zip(group, result, strict=True)]
    return verdicts
