"""The JAX side of bench/step: a GPT as JAX is commonly written, scan over layers, jitted, donated.

Arguments: a JSON of sizes and the dtype, and the file of weights and tokens. Reads lines with a
number of steps and answers with seconds and CPU seconds for each, then the losses.
"""

import functools
import json
import os
import resource
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np

c = json.loads(sys.argv[1])
V, D, L, H, B, T = (c[k] for k in ("vocab", "hidden", "layers", "heads", "batch", "seq"))
M, K = 4 * D, D // H
dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[c["dtype"]]
raw = np.fromfile(sys.argv[2], np.float32)
at = 0


def take(*shape):
    global at
    n = int(np.prod(shape))
    at += n
    return raw[at - n : at].reshape(shape)


embed, position = take(V, D), take(T, D)
layers = []
for _ in range(L):
    n1, q, k, v, o, n2, up, down = (
        take(D), take(D, D), take(D, D), take(D, D), take(D, D), take(D), take(D, M), take(M, D))
    layers.append(dict(n1=n1, qkv=np.concatenate([q, k, v], 1), o=o, n2=n2, up=up, down=down))
params = dict(embed=embed, position=position, norm=take(D),
              layers={k: np.stack([x[k] for x in layers]) for k in layers[0]})
params = jax.tree.map(jnp.asarray, params)
tokens = raw[at:].view(np.int32).reshape(2, B, T)
ids, labels = jnp.asarray(tokens[0]), jnp.asarray(tokens[1])
del raw


def norm(x, w):
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5)
    return (y * w.astype(jnp.float32)).astype(x.dtype)


def block(x, p):
    q, k, v = jnp.split(norm(x, p["n1"]) @ p["qkv"], 3, -1)
    q, k, v = (a.reshape(B, T, H, K) for a in (q, k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(K)
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    a = jax.nn.softmax(s, -1).astype(x.dtype)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(B, T, D) @ p["o"]
    x = x + jax.nn.gelu(norm(x, p["n2"]) @ p["up"]) @ p["down"]
    return x, None


def loss_of(params, ids, labels):
    p = jax.tree.map(lambda a: a.astype(dtype), params)
    x = p["embed"][ids] + p["position"]
    x, _ = jax.lax.scan(block, x, p["layers"])
    logits = (norm(x, p["norm"]) @ p["embed"].T).astype(jnp.float32)
    logp = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], -1))


b1, b2, eps, rate, decay = 0.9, 0.95, 1e-8, 3e-4, 0.1


@functools.partial(jax.jit, donate_argnums=0)
def step(state, ids, labels):
    p, m, v, t = state
    loss, g = jax.value_and_grad(loss_of)(p, ids, labels)
    size = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(g)))
    clip = jnp.minimum(1.0, 1.0 / size)
    t = t + 1
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g * clip, m, g)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * (g * clip) ** 2, v, g)
    f1, f2 = 1 / (1 - b1**t), 1 / (1 - b2**t)
    p = jax.tree.map(
        lambda p, m, v: p - rate * (m * f1 / (jnp.sqrt(v * f2) + eps) + decay * p), p, m, v)
    return (p, m, v, t), loss


zeros = functools.partial(jax.tree.map, jnp.zeros_like)
state = (params, zeros(params), zeros(params), jnp.float32(0))
print("ready", jax.__version__, flush=True)


def cpu():
    r = resource.getrusage(resource.RUSAGE_SELF)
    return r.ru_utime + r.ru_stime


for line in sys.stdin:
    n, losses = int(line), []
    begin, used = time.perf_counter(), cpu()
    for _ in range(n):
        state, loss = step(state, ids, labels)
        losses.append(float(loss))
    jax.block_until_ready(state)
    took, used = time.perf_counter() - begin, cpu() - used
    print(took / n, used / n, *losses, flush=True)
