"""Versions of this code and of JAX, without importing JAX."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from shardwright import __version__


def shardwright_version() -> str:
    """The version of the running code: the installed one may be older when the sources are in place."""
    return __version__


@cache
def jax_version() -> str:
    try:
        return version("jax")
    except PackageNotFoundError:
        return "not installed"
