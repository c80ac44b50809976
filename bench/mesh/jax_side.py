"""The JAX side of bench/mesh: bench/step's GPT on a mesh of CPU devices, jitted, donated.

Arguments: a JSON of sizes, the dtype and the mode, and the file of weights and tokens. The mode is
a way, the devices of fsdp and those of tp. Ways:

explicit   a mesh of explicit axes: types carry the sharding, and what is written down are changes
           of it (jax.sharding.reshard); the partitioner writes the collectives
shard_map  one device's program with its collectives (jax.shard_map), as Megatron has them
...+seq    between the products of a layer the sequence is cut by tp, too
...+loop   layers in a Python loop instead of a scan

Reads lines with a number of steps and answers with seconds and CPU seconds for each, then the
losses.
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

c = json.loads(sys.argv[1])
V, D, L, H, B, T = (c[k] for k in ("vocab", "hidden", "layers", "heads", "batch", "seq"))
way, F, N = c["mode"].split()
way, *more = way.split("+")
F, N = int(F), int(N)
SEQ = "seq" in more and N > 1
M, K = 4 * D, D // H
dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[c["dtype"]]
kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
mesh = jax.make_mesh((F, N), ("fsdp", "tp"), axis_types=(kind, kind))
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
    qkv = np.stack([a.reshape(D, H, K) for a in (q, k, v)], 1)  # D, 3, H, K
    layers.append(dict(n1=n1, qkv=qkv, o=o.reshape(H, K, D), n2=n2, up=up, down=down))
params = dict(embed=embed, position=position, norm=take(D),
              layers={k: np.stack([x[k] for x in layers]) for k in layers[0]})
specs = dict(embed=P("tp", "fsdp"), position=P("fsdp"), norm=P(), layers=dict(
    n1=P(None, None), qkv=P(None, "fsdp", None, "tp"), o=P(None, "tp", None, "fsdp"),
    n2=P(None, None), up=P(None, "fsdp", "tp"), down=P(None, "tp", "fsdp")))
if N == 1:
    specs = jax.tree.map(lambda s: P(*(None if a == "tp" else a for a in s)), specs)
put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
params = jax.tree.map(put, params, specs)
tokens = raw[at:].view(np.int32).reshape(2, B, T)
ids, labels = put(tokens[0], P("fsdp")), put(tokens[1], P("fsdp"))
del raw

tp = "tp" if N > 1 else None


def norm(x, w):
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5)
    return (y * w.astype(jnp.float32)).astype(x.dtype)


def attend(q, k, v):
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(K)
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1).astype(q.dtype), v)


if way == "explicit":
    flow = P("fsdp", tp if SEQ else None)  # what goes from layer to layer
    whole = lambda w, spec: jax.sharding.reshard(w.astype(dtype), spec)
    enter = lambda x: jax.sharding.reshard(x, P("fsdp"))

    def block(x, p):
        qkv = whole(p["qkv"], P(None, None, tp))
        h = jnp.einsum("btd,dchk->btchk", enter(norm(x, p["n1"])), qkv)
        a = attend(h[:, :, 0], h[:, :, 1], h[:, :, 2])
        x = x + jnp.einsum("bqhk,hkd->bqd", a, whole(p["o"], P(tp)), out_sharding=flow)
        h = jax.nn.gelu(enter(norm(x, p["n2"])) @ whole(p["up"], P(None, tp)))
        x = x + jnp.einsum("btm,md->btd", h, whole(p["down"], P(tp)), out_sharding=flow)
        return x, None

    def loss_of(p, ids, labels):
        embed = whole(p["embed"], P(tp))
        x = embed.at[ids].get(out_sharding=flow) + whole(p["position"], P(tp if SEQ else None))
        x = jax.sharding.reshard(x, flow)
        x, _ = through(x, p["layers"])
        logits = jnp.einsum("btd,vd->btv", enter(norm(x, p["norm"])), embed).astype(jnp.float32)
        top = jax.lax.stop_gradient(jnp.max(logits, -1))
        lse = jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), -1)) + top
        mine = jax.lax.broadcasted_iota(
            jnp.int32, logits.shape, 2, out_sharding=P("fsdp", None, tp))
        score = jnp.sum(jnp.where(mine == labels[..., None], logits, 0), -1)
        return jnp.mean(lse - score)
else:
    gather = lambda w, dim: jax.lax.all_gather(w.astype(dtype), "fsdp", axis=dim, tiled=True)
    enter = lambda x: jax.lax.all_gather(x, "tp", axis=1, tiled=True) if SEQ else x

    def leave(x):
        if N == 1:
            return x
        if SEQ:
            return jax.lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True)
        return jax.lax.psum(x, "tp")

    def block(x, p):
        h = jnp.einsum("btd,dchk->btchk", enter(norm(x, p["n1"])), gather(p["qkv"], 0))
        a = attend(h[:, :, 0], h[:, :, 1], h[:, :, 2])
        x = x + leave(jnp.einsum("bqhk,hkd->bqd", a, gather(p["o"], 2)))
        h = jax.nn.gelu(enter(norm(x, p["n2"])) @ gather(p["up"], 0))
        return x + leave(h @ gather(p["down"], 1)), None

    def loss_of(p, ids, labels):
        embed, position = gather(p["embed"], 1), gather(p["position"], 0)
        if N == 1:
            x = embed[ids] + position
        else:
            local = ids - jax.lax.axis_index("tp") * (V // N)
            has = (local >= 0) & (local < V // N)
            x = jnp.where(has[..., None], embed[jnp.where(has, local, 0)], 0)
            if SEQ:
                n = T // N
                position = jax.lax.dynamic_slice_in_dim(position, jax.lax.axis_index("tp") * n, n)
            x = leave(x) + position
        x, _ = through(x, p["layers"])
        logits = jnp.einsum("btd,vd->btv", enter(norm(x, p["norm"])), embed).astype(jnp.float32)
        if N == 1:
            logp = jax.nn.log_softmax(logits)
            return -jnp.sum(jnp.take_along_axis(logp, labels[..., None], -1)) / (B * T)
        top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, -1)), "tp")
        total = jax.lax.psum(jnp.sum(jnp.exp(logits - top[..., None]), -1), "tp")
        local = labels - jax.lax.axis_index("tp") * (V // N)
        mine = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == local[..., None]
        score = jax.lax.psum(jnp.sum(jnp.where(mine, logits, 0), -1), "tp")
        return jnp.sum(jnp.log(total) + top - score) / (B * T)


def through(x, layers):
    if "loop" not in more:
        return jax.lax.scan(block, x, layers)
    for i in range(L):
        x, _ = block(x, jax.tree.map(lambda a: a[i], layers))
    return x, None


b1, b2, eps, rate, decay = 0.9, 0.95, 1e-8, 3e-4, 0.1


def size_of(g):
    """The sum of the squares of all gradients; one device's program has its own pieces."""
    if way == "explicit":
        return sum(jnp.sum(x * x) for x in jax.tree.leaves(g))
    by = {}
    for x, s in zip(jax.tree.leaves(g), jax.tree.leaves(specs)):
        axes = tuple(a for a in s if a)
        by[axes] = by.get(axes, 0) + jnp.sum(x * x)
    return sum(jax.lax.psum(x, axes) if axes else x for axes, x in by.items())


def step(state, ids, labels):
    p, m, v, t = state
    loss, g = jax.value_and_grad(loss_of)(p, ids, labels)
    if way != "explicit":
        loss = jax.lax.psum(loss, "fsdp")
    clip = jnp.minimum(1.0, 1.0 / jnp.sqrt(size_of(g)))
    t = t + 1
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g * clip, m, g)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * (g * clip) ** 2, v, g)
    f1, f2 = 1 / (1 - b1**t), 1 / (1 - b2**t)
    p = jax.tree.map(
        lambda p, m, v: p - rate * (m * f1 / (jnp.sqrt(v * f2) + eps) + decay * p), p, m, v)
    return (p, m, v, t), loss


if way != "explicit":
    every = (specs, specs, specs, P())
    if N == 1:
        mesh = jax.make_mesh((F,), ("fsdp",), axis_types=(kind,))
        params, ids, labels = jax.tree.map(lambda a: put(a, a.sharding.spec), (params, ids, labels))
    step = jax.shard_map(step, mesh=mesh, in_specs=(every, P("fsdp"), P("fsdp")),
                         out_specs=(every, P()))
step = jax.jit(step, donate_argnums=0)
zeros = functools.partial(jax.tree.map, jnp.zeros_like)
jax.set_mesh(mesh)
state = (params, zeros(params), zeros(params), put(np.float32(0), P()))
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
