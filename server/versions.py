"""Versions of installed packages, without importing them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def shardwright_version() -> str:
    return _version("shardwright")


def jax_version() -> str:
    return _version("jax")
