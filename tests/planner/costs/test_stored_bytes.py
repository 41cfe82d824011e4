"""Bytes of shards, by the integers of their shardings: as the cost model counts them, whenever they are asked for."""

from __future__ import annotations

import numpy as np

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.cost.peak.memory import shard_bytes
from shardwright.hlo import ArrayShape
from shardwright.planner.costs.prices import Prices
from shardwright.plans.shardings import Mesh, TensorSharding

MESH = Mesh.of({"data": 4, "model": 2})
SHAPE = ArrayShape("bf16", (6, 8))
LIES = [
    TensorSharding(((), ())),
    TensorSharding((("data",), ())),
    TensorSharding((("model",), ("data",))),
    TensorSharding(((), ("data", "model"))),
    TensorSharding(((), ("data",)), ("model",)),
]


def test_bytes_are_those_of_one_shard_also_of_shardings_that_come_later() -> None:
    prices = Prices(MESH, Cluster.local(8), hardware_profile("cpu"))
    first = np.array([prices.identify(each) for each in LIES[:2]])
    assert prices.bytes_per_device(SHAPE, first).tolist() == [96.0, 32.0]
    every = np.array([prices.identify(each) for each in reversed(LIES)])
    wanted = [shard_bytes("bf16", SHAPE.dimensions, each, MESH) for each in reversed(LIES)]
    assert prices.bytes_per_device(SHAPE, every).tolist() == wanted
    assert prices.bytes_per_device(ArrayShape("f32", (6, 8)), first).tolist() == [192.0, 64.0], "of each type its own"
