"""Functions that tests run as ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np


def place(word: str, *, scale: float = 1.0) -> tuple[str, int, float]:
    return word, int(os.environ["SHARDWRIGHT_RANK"]), scale


def give_back(value: Any) -> Any:
    return value


def fail_on_one() -> None:
    if os.environ["SHARDWRIGHT_RANK"] == "1":
        raise ValueError("of rank one")
    time.sleep(60)


def leave() -> None:
    raise SystemExit(5)


def result_that_cannot_travel() -> object:
    return object()


def rows(count: int) -> np.ndarray:
    return np.full((count, 2), float(os.environ["SHARDWRIGHT_RANK"]), np.float32)


def vanish() -> None:
    os._exit(0)


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(300)


class Trainer:
    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @staticmethod
    def fit() -> str:
        return "fitted"

    def method(self) -> None: ...
