"""Links between devices: the kinds known to cluster files (`links.toml`), and their notation.

A link is written with the name of a kind (`"infiniband-hdr"`), with a kind and its number of ports in a node (`{"kind":
"infiniband-hdr", "ports": 8}`), or in numbers (`{"bandwidth_gb_per_s": 25, "latency_us": 8}`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from shardwright.spelling import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Speed of a link between two devices, one way: one device's rate while all devices send at once."""

    bandwidth_bytes_per_s: float
    latency_s: float | None = None  # None: the hardware profile's


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """A kind of link. is_shared: devices of a node share its ports, of which this is one; else each has its own."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    is_shared: bool
    sources: tuple[str, ...]


class LinkProblem(ValueError):
    """Problem of a written link, and its `remedy`."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@cache
def link_kinds() -> Mapping[str, LinkKind]:
    """All kinds by name, from `links.toml`."""
    data = tomllib.loads((resources.files("shardwright.clusters") / "links.toml").read_text(encoding="utf-8"))
    return {
        name: LinkKind(
            name=name,
            bandwidth_bytes_per_s=float(entry["bandwidth_bytes_per_s"]["value"]),
            latency_s=float(entry["latency_s"]["value"]),
            is_shared=entry["per"] == "port",
            sources=(entry["bandwidth_bytes_per_s"]["source"], entry["latency_s"]["source"]),
        )
        for name, entry in data.items()
    }


def read_link(written: str | Mapping[str, Any], *, devices_of_node: int, is_inside_node: bool) -> Link:
    """The link written in a cluster file with nodes of at most `devices_of_node` devices.

    Raises LinkProblem: an unknown kind; a kind and numbers together, or neither; ports on a link without any.
    """
    data: dict[str, Any] = {"kind": written} if isinstance(written, str) else dict(written)
    latency_us = data.get("latency_us")
    latency_s = None if latency_us is None else latency_us * 1e-6
    if "kind" not in data:
        if "bandwidth_gb_per_s" not in data:
            raise LinkProblem("neither kind nor bandwidth_gb_per_s is given", "add one of them")
        if "ports" in data:
            raise LinkProblem("ports without kind", "bandwidth_gb_per_s is per device: multiply, and drop ports")
        return Link(bandwidth_bytes_per_s=data["bandwidth_gb_per_s"] * 1e9, latency_s=latency_s)
    kind = _kind(data["kind"])
    if "bandwidth_gb_per_s" in data:
        raise LinkProblem("both kind and bandwidth_gb_per_s are given", "keep one of them")
    if "ports" in data and not kind.is_shared:
        raise LinkProblem(f"ports of {kind.name}, which every device has for itself", "drop ports")
    if kind.is_shared and is_inside_node:
        raise LinkProblem(f"{kind.name} joins nodes, not the devices of one", "name it as inter_node")
    share = data.get("ports", 1) / devices_of_node if kind.is_shared else 1
    return Link(
        bandwidth_bytes_per_s=kind.bandwidth_bytes_per_s * share,
        latency_s=kind.latency_s if latency_s is None else latency_s,
    )


def _kind(name: str) -> LinkKind:
    kinds = link_kinds()
    if name not in kinds:
        remedy = did_you_mean(name, kinds) or f"use one of {', '.join(kinds)}, or numbers"
        raise LinkProblem(f"no kind of link is called {name!r}", remedy)
    return kinds[name]
