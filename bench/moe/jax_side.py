"""The JAX side of bench/moe: a mixture of experts and its gradient, as JAX is commonly written with
ragged_dot, and with batched dots over a capacity.

Argument: a JSON of sizes. Reads lines "FORM DTYPE COUNT" and answers with seconds per execution.
"""

import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np

c = json.loads(sys.argv[1])
T, D, F, E, K, C = (c[k] for k in ("tokens", "embed", "mlp", "experts", "top", "slots"))
rng = np.random.default_rng(1)


def weights(dtype):
    w = lambda *s: jnp.asarray(rng.normal(0, 0.05, s), dtype)
    return dict(router=w(D, E).astype(jnp.float32), gate=w(E, D, F), up=w(E, D, F), down=w(E, F, D))


def route(x, p):
    scores = jax.nn.softmax(x.astype(jnp.float32) @ p["router"])
    top, idx = jax.lax.top_k(scores, K)
    return top / top.sum(-1, keepdims=True), idx


def ragged(x, p):
    """Sort tokens by expert, and let ragged_dot multiply groups."""
    top, idx = route(x, p)
    order = jnp.argsort(idx.reshape(-1), stable=True)
    sizes = jnp.bincount(idx.reshape(-1), length=E)
    rows = x[order // K]
    h = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    y = jax.lax.ragged_dot(h, p["down"], sizes)
    y = y * top.reshape(-1)[order][:, None].astype(y.dtype)
    return jnp.zeros_like(x).at[order // K].add(y)


def batched(x, p):
    """Rows in slots of experts, and batched dots."""
    top, idx = route(x, p)
    flat = idx.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=E)
    first = jnp.cumsum(counts) - counts
    pos = jnp.zeros(T * K, jnp.int32).at[order].set(jnp.arange(T * K, dtype=jnp.int32) - first[flat[order]])
    slot = jnp.where(pos < C, flat * C + pos, E * C)
    rows = jnp.zeros((E * C, D), x.dtype).at[slot].set(x[jnp.arange(T * K) // K], mode="drop").reshape(E, C, D)
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", rows, p["gate"])) * jnp.einsum("ecd,edf->ecf", rows, p["up"])
    y = jnp.einsum("ecf,efd->ecd", h, p["down"]).reshape(E * C, D)
    y = jnp.where((slot < E * C)[:, None], y[jnp.minimum(slot, E * C - 1)], 0)
    return (y.reshape(T, K, D) * top[..., None].astype(y.dtype)).sum(1)


def step(form):
    loss = lambda p, x: (form(x, p).astype(jnp.float32) ** 2).mean()
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


forms, args = {"ragged": step(ragged), "batched": step(batched)}, {}
for name in ("f32", "bf16"):
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[name]
    args[name] = weights(dtype), jnp.asarray(rng.normal(0, 1, (T, D)), dtype)
print("ready", jax.__version__, flush=True)
for line in sys.stdin:
    form, dtype, count = line.split()
    f, a = forms[form], args[dtype]
    jax.block_until_ready(f(*a))
    begin = time.perf_counter()
    for _ in range(int(count)):
        jax.block_until_ready(f(*a))
    print((time.perf_counter() - begin) / int(count), flush=True)
