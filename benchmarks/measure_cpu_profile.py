"""Measure the `cpu` hardware profile: 8 XLA:CPU devices on one machine.

Prints the figures under the names of shardwright/cost/data/cpu.toml. All devices work at
once, like in a step: each figure is one device's share of the machine.

    python benchmarks/measure_cpu_profile.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DEVICES = 8
MESH = Mesh(jax.devices()[:DEVICES], ("x",))
SPLIT = NamedSharding(MESH, PartitionSpec("x"))
WHOLE = NamedSharding(MESH, PartitionSpec())
REPEATS = 7


def time_calls(function: Callable[..., jax.Array], *arguments: jax.Array, repeats: int = REPEATS) -> list[float]:
    """Seconds of each call, the first (compilation) left out."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return times


def min_call_s(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Minimum seconds of one call."""
    return min(time_calls(function, *arguments))


def make_blocks(*shape: int) -> jax.Array:
    """One block of ones per device."""
    return jax.device_put(jnp.ones((DEVICES, *shape), jnp.float32), SPLIT)


def measure_collective_s(collective: Callable[[jax.Array], jax.Array], group_size: int, elements: int) -> float:
    """Seconds of one collective on `elements` floats a device: (24-call chain - 4-call chain) / 20.

    Medians, not minima: the time includes the threads' waits for one another.
    """
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(-1, group_size), ("groups", "members"))
    spec = PartitionSpec(("groups", "members"))
    operand = jax.device_put(jnp.ones(DEVICES * elements), NamedSharding(mesh, spec))

    def measure_chain_s(length: int) -> float:
        def chain(x: jax.Array) -> jax.Array:
            for number in range(length):
                x = collective(x)[:elements] * 0.1 + number
            return x

        mapped = jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return statistics.median(time_calls(jax.jit(mapped), operand, repeats=8 * REPEATS))

    return (measure_chain_s(24) - measure_chain_s(4)) / 20


def all_reduce(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "members")


def all_gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "members", tiled=True)


def main() -> None:
    size, elements = 512, 1 << 22
    product = jax.jit(lambda a, b: a @ b, out_shardings=SPLIT)
    product_s = min_call_s(product, make_blocks(size, size), make_blocks(size, size))
    scaled_s = min_call_s(jax.jit(lambda a: a * 2.0, out_shardings=SPLIT), make_blocks(elements))
    transcendental_s = min_call_s(jax.jit(lambda a: jnp.exp(jnp.tanh(a)), out_shardings=SPLIT), make_blocks(elements))
    small_s, large_s = measure_collective_s(all_reduce, DEVICES, 16), measure_collective_s(all_reduce, DEVICES, 1 << 20)
    wire = 2 * 4 * (1 << 20) * (DEVICES - 1) / DEVICES
    print(f"f32 matmul attained    {2 * size**3 / product_s:.3g} flops/s")
    print(f"vector_flops_per_s     {2 * elements / transcendental_s:.3g}")
    print(f"memory_bandwidth       {2 * 4 * elements / scaled_s:.3g} bytes/s")
    print(f"intra_node.latency_s   {small_s / DEVICES:.3g}")
    print(f"intra_node.bandwidth   {wire / (large_s - small_s):.3g} bytes/s")
    for collective in (all_reduce, all_gather):
        times = {size: measure_collective_s(collective, size, 16) for size in (2, 4, 8)}
        print(
            f"latency, {collective.__name__:11s} ", ", ".join(f"{n} members {t * 1e6:.0f} us" for n, t in times.items())
        )


if __name__ == "__main__":
    main()
