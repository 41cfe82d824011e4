#!/usr/bin/env bash
# What libtpu makes of jax.lax.ragged_dot, compiled for a TPU v5e that is not here.
#
# Versions: jax 0.10.2, jaxlib 0.10.2, libtpu 0.0.42.1
#
# Seen:
#   1. A product is a kernel of 2 M K N operations; a gradient of the matrices counts 2 G M K N: rows are masked.
#   2. A product that is split along what is summed, and scattered, is one kernel named "ragged-dot-reduce-scatter": the
#      compiled text has neither a reduce-scatter nor an all-reduce, though devices add their terms up.
#
# Usage: ragged-dot-masks.sh [FOLDER]   installs the packages into FOLDER (default: a new one); needs python 3.11, pip.
# Prints what it sees, and exits 1 if that has changed.
set -euo pipefail
folder=${1:-$(mktemp -d)}
if [ ! -x "$folder/bin/python" ]; then
    python3 -m venv "$folder"
    "$folder/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
    "$folder/bin/pip" install -q --no-deps --target "$folder/tpu" libtpu==0.0.42.1
fi
export JAX_PLATFORMS=cpu ALLOW_MULTIPLE_LIBTPU_LOAD=1 TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost
export TPU_LIBRARY_PATH=${TPU_LIBRARY_PATH:-$folder/tpu/libtpu/libtpu.so}
exec "$folder/bin/python" - <<'PYTHON'
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

ROWS, WIDTH, COLUMNS, GROUPS = 8192, 512, 1024, 8
devices = topologies.get_topology_desc("v5e:2x4", "tpu", chips_per_host_bounds=(2, 2, 1)).devices
one = jax.sharding.SingleDeviceSharding(devices[0])
mesh = jax.make_mesh((4, 2), ("d", "m"), (jax.sharding.AxisType.Auto,) * 2, devices=devices)


def array(sharding, *shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def weights(x, y, sizes):
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(x, y, sizes, dims)


def compiled(function, *arguments, **options):
    return jax.jit(function, **options).lower(*arguments).compile()


sizes = array(one, GROUPS, dtype=jnp.int32)
x, w, y = array(one, ROWS, WIDTH), array(one, GROUPS, WIDTH, COLUMNS), array(one, ROWS, COLUMNS)
work = 2 * ROWS * WIDTH * COLUMNS
forward = compiled(jax.lax.ragged_dot, x, w, sizes).cost_analysis()["flops"] / work
backward = compiled(weights, x, y, sizes).cost_analysis()["flops"] / work

rows, matrices, whole, result = (
    NamedSharding(mesh, P(*spec)) for spec in ((None, "m"), (None, "m", "d"), (), (None, ("d", "m")))
)
arguments = array(rows, ROWS, WIDTH), array(matrices, GROUPS, WIDTH, COLUMNS), array(whole, GROUPS, dtype=jnp.int32)


def scattered(x, w, sizes):
    terms = jax.lax.with_sharding_constraint(jax.lax.ragged_dot(x, w, sizes), NamedSharding(mesh, P(None, "d")))
    return jax.lax.with_sharding_constraint(terms, result)


split = compiled(scattered, *arguments, out_shardings=result).as_text()
fused = "ragged-dot-reduce-scatter" in split
collectives = sorted(set(re.findall(r" (reduce-scatter|all-reduce|all-gather|all-to-all|collective-permute)[-\w.]*\(", split)))

print(f"jax {jax.__version__}, groups {GROUPS}")
print(f"operations / 2 M K N: product {forward:.2f}, gradient of the matrices {backward:.2f}")
print(f"split along what is summed: ragged-dot-reduce-scatter {fused}, collectives {collectives}")
same = abs(forward - 1) < 0.1 and abs(backward - GROUPS) < 0.1 * GROUPS and fused and not collectives
sys.exit(0 if same else "this has changed")
PYTHON
