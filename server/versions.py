"""Versions of this code and of JAX, without importing JAX."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from shardwright.package import VERSION


def shardwright_version() -> str:
    """The version of the running code: the installed one may be older when the sources are in place."""
    return VERSION


@cache
def jax_version() -> str:
    try:
        return version("jax")
    except PackageNotFoundError:
        return "not installed"
