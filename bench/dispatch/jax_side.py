"""The JAX side of bench/dispatch: runs the same programs and answers how long they took.

Reads lines "NAME MODE COUNT" and answers with seconds per execution. Modes: "wait" waits for each
execution, "queue" starts them all and waits at the end.
"""

import os
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("d",))
spread = P("d")


def program(body):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spread, out_specs=spread))


programs = {
    "element-wise": program(lambda x: x * 2 + 1),
    "psum": program(lambda x: jax.lax.psum(x, "d") * 0.125),
}
start = jax.device_put(jnp.ones((8 * 128,), jnp.float32), NamedSharding(mesh, spread))
for f in programs.values():
    f(start).block_until_ready()
print("ready", jax.__version__, flush=True)
for line in sys.stdin:
    name, mode, count = line.split()
    f, x = programs[name], start
    begin = time.perf_counter()
    for _ in range(int(count)):
        x = f(x)
        if mode == "wait":
            x.block_until_ready()
    x.block_until_ready()
    print((time.perf_counter() - begin) / int(count), flush=True)
