"""Measure the numbers of the `cpu` hardware profile: 8 XLA:CPU devices that share this machine.

Prints them under the names of shardwright/cost/data/cpu.toml. All devices work at
once, as they do in a step, so each number is one device's share of the machine.

    python benchmarks/measure_cpu_profile.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DEVICES = 8
MESH = Mesh(jax.devices()[:DEVICES], ("x",))
SPLIT = NamedSharding(MESH, PartitionSpec("x"))
WHOLE = NamedSharding(MESH, PartitionSpec())
REPEATS = 7


def best_s(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Least seconds of one call, the first (compilation) left out."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def blocks(*shape: int) -> jax.Array:
    """One block of ones per device."""
    return jax.device_put(jnp.ones((DEVICES, *shape), jnp.float32), SPLIT)


def reduce_s(elements: int) -> float:
    """Seconds of one all-reduce of `elements` floats, from a chain of ten."""

    def chain(x: jax.Array) -> jax.Array:
        total = jnp.zeros(elements)
        for _ in range(10):
            total = jax.lax.with_sharding_constraint((x * (total + 1.0)).sum(axis=0), WHOLE)
        return total

    return best_s(jax.jit(chain, in_shardings=SPLIT, out_shardings=WHOLE), blocks(elements)) / 10


def main() -> None:
    size, elements = 512, 1 << 22
    product = jax.jit(lambda a, b: a @ b, out_shardings=SPLIT)
    product_s = best_s(product, blocks(size, size), blocks(size, size))
    scaled_s = best_s(jax.jit(lambda a: a * 2.0, out_shardings=SPLIT), blocks(elements))
    transcendental_s = best_s(jax.jit(lambda a: jnp.exp(jnp.tanh(a)), out_shardings=SPLIT), blocks(elements))
    small_s, large_s = reduce_s(16), reduce_s(1 << 20)
    steps, wire = 2 * (DEVICES - 1), 2 * 4 * (1 << 20) * (DEVICES - 1) / DEVICES
    print(f"f32 matmul attained    {2 * size**3 / product_s:.3g} flops/s")
    print(f"vector_flops_per_s     {2 * elements / transcendental_s:.3g}")
    print(f"memory_bandwidth       {2 * 4 * elements / scaled_s:.3g} bytes/s")
    print(f"intra_node.latency_s   {small_s / steps:.3g}")
    print(f"intra_node.bandwidth   {wire / (large_s - small_s):.3g} bytes/s")


if __name__ == "__main__":
    main()
