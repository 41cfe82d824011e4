"""Programs of JAX that tests run as ranks."""

from __future__ import annotations

#: Joins the job as any program of JAX does.
JOIN = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

rank, size = int(os.environ["SHARDWRIGHT_RANK"]), int(os.environ["SHARDWRIGHT_SIZE"])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(num_processes=size, process_id=rank)
mesh = Mesh(np.array(jax.devices()), "ranks")
part = np.full((1,), rank + 1.0, np.float32)
whole = jax.make_array_from_single_device_arrays(
    (size,), NamedSharding(mesh, P("ranks")), [jax.device_put(part, jax.local_devices()[0])])
total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(whole)
print("sum", float(total.addressable_data(0)), flush=True)
"""

#: Rank 0 dies once the other has joined; the other still asks the service, then waits to be ended.
LOSE_RANK_0 = (
    JOIN
    + """
client = distributed.global_state.client
if rank == 0:
    client.wait_at_barrier("both", 20_000)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), os._exit(0)))
client.wait_at_barrier("both", 20_000)
time.sleep(0.2)
client.key_value_set("alive", "yes")
print("service says", client.blocking_key_value_get("alive", 5_000), flush=True)
while True:
    time.sleep(0.05)
"""
)

ONE_DEVICE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
