"""Servers as operators see them: what Prometheus scrapes, what the log says."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

import shardwright as sw
from tests.server.raw_client import Server

Labels = tuple[tuple[str, str], ...]


class Scrape:
    """The metrics of a server at one time."""

    def __init__(self, port: int) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        self.types = {family.name: family.type for family in families}
        self.samples: dict[tuple[str, Labels], float] = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The value of one sample; `shardwright_` is understood."""
        return self.samples[f"shardwright_{name}", tuple(sorted(labels.items()))]

    def has(self, name: str, **labels: str) -> bool:
        return (f"shardwright_{name}", tuple(sorted(labels.items()))) in self.samples

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(value for (of, _), value in self.samples.items() if of == f"shardwright_{name}")


def health(port: int, service: str = "") -> str:
    """What gRPC health says at a plain port: "SERVING", "NOT_SERVING", or "nothing" where nobody answers."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        except grpc.RpcError:
            return "nothing"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def run_steps(session: sw.Session, count: int, factor: float = 2.0) -> np.ndarray:
    """`factor` to the power of `count`, four times, by so many steps."""
    step = session.parallelize(lambda x: factor * x)
    x = np.ones(4, np.float32)
    for _ in range(count):
        x = step(x)
    return np.asarray(x)


def log_of(server: Server) -> list[dict[str, Any]]:
    """What a server has written to standard error, once it ended; each line is JSON."""
    _, errors = server.end()
    return [json.loads(line) for line in errors.splitlines()]
