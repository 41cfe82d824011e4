"""Measure the numbers of the `cpu` hardware profile: 8 XLA:CPU devices that share this machine.

Prints them under the names of shardwright/cost/data/cpu.toml. All devices work at
once, as they do in a step, so each number is one device's share of the machine.

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


def call_times_s(function: Callable[..., jax.Array], *arguments: jax.Array, repeats: int = REPEATS) -> list[float]:
    """Seconds of each call, the first (compilation) left out."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return times


def best_s(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Least seconds of one call."""
    return min(call_times_s(function, *arguments))


def blocks(*shape: int) -> jax.Array:
    """One block of ones per device."""
    return jax.device_put(jnp.ones((DEVICES, *shape), jnp.float32), SPLIT)


def collective_s(collective: Callable[[jax.Array], jax.Array], group_size: int, elements: int) -> float:
    """Seconds of one collective on `elements` floats a device, by the difference of a long and a short chain.

    Medians: how long threads wait for one another is what is measured, so luck must not decide.
    """
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(-1, group_size), ("groups", "members"))
    spec = PartitionSpec(("groups", "members"))
    operand = jax.device_put(jnp.ones(DEVICES * elements), NamedSharding(mesh, spec))

    def chain_s(length: int) -> float:
        def chain(x: jax.Array) -> jax.Array:
            for number in range(length):
                x = collective(x)[:elements] * 0.1 + number
            return x

        mapped = jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return statistics.median(call_times_s(jax.jit(mapped), operand, repeats=8 * REPEATS))

    return (chain_s(24) - chain_s(4)) / 20


def all_reduce(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "members")


def all_gather(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "members", tiled=True)


def main() -> None:
    size, elements = 512, 1 << 22
    product = jax.jit(lambda a, b: a @ b, out_shardings=SPLIT)
    product_s = best_s(product, blocks(size, size), blocks(size, size))
    scaled_s = best_s(jax.jit(lambda a: a * 2.0, out_shardings=SPLIT), blocks(elements))
    transcendental_s = best_s(jax.jit(lambda a: jnp.exp(jnp.tanh(a)), out_shardings=SPLIT), blocks(elements))
    small_s, large_s = collective_s(all_reduce, DEVICES, 16), collective_s(all_reduce, DEVICES, 1 << 20)
    wire = 2 * 4 * (1 << 20) * (DEVICES - 1) / DEVICES
    print(f"f32 matmul attained    {2 * size**3 / product_s:.3g} flops/s")
    print(f"vector_flops_per_s     {2 * elements / transcendental_s:.3g}")
    print(f"memory_bandwidth       {2 * 4 * elements / scaled_s:.3g} bytes/s")
    print(f"intra_node.latency_s   {small_s / DEVICES:.3g}")
    print(f"intra_node.bandwidth   {wire / (large_s - small_s):.3g} bytes/s")
    for collective in (all_reduce, all_gather):
        times = {size: collective_s(collective, size, 16) for size in (2, 4, 8)}
        print(
            f"latency, {collective.__name__:11s} ", ", ".join(f"{n} members {t * 1e6:.0f} us" for n, t in times.items())
        )


if __name__ == "__main__":
    main()
