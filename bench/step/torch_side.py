"""The PyTorch side of bench/step: the same GPT as PyTorch is commonly written, eager or compiled.

Arguments and answers are those of jax_side.py. bf16 is autocast over f32 parameters.
"""

import json
import resource
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

c = json.loads(sys.argv[1])
V, D, L, H, B, T = (c[k] for k in ("vocab", "hidden", "layers", "heads", "batch", "seq"))
M, K = 4 * D, D // H
raw = np.fromfile(sys.argv[2], np.float32)
at = 0


def take(*shape):
    global at
    n = int(np.prod(shape))
    at += n
    return torch.from_numpy(raw[at - n : at].reshape(shape))


def linear(w):
    """A linear layer of a weight [in, out]."""
    layer = nn.Linear(w.shape[0], w.shape[1], bias=False)
    layer.weight.data.copy_(w.T)
    return layer


def scale(w):
    n = nn.RMSNorm(D, eps=1e-5)
    n.weight.data.copy_(w)
    return n


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1 = scale(take(D))
        self.qkv = linear(torch.cat([take(D, D), take(D, D), take(D, D)], 1))
        self.o = linear(take(D, D))
        self.n2 = scale(take(D))
        self.up = linear(take(D, M))
        self.down = linear(take(M, D))

    def forward(self, x):
        q, k, v = (a.view(B, T, H, K).transpose(1, 2) for a in self.qkv(self.n1(x)).split(D, 2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(take(V, D).clone(), freeze=False)
        self.position = nn.Embedding.from_pretrained(take(T, D).clone(), freeze=False)
        self.blocks = nn.ModuleList([Block() for _ in range(L)])
        self.norm = scale(take(D))

    def forward(self, ids, labels):
        x = self.embed(ids) + self.position(torch.arange(T))
        for b in self.blocks:
            x = b(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, V).float(), labels.view(-1))


model = GPT()
tokens = torch.from_numpy(raw[at:].view(np.int32).reshape(2, B, T).copy()).long()
ids, labels = tokens[0], tokens[1]
run = torch.compile(model) if c["mode"] == "compile" else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8,
                              weight_decay=0.1, fused=True)
autocast = torch.autocast("cpu", torch.bfloat16, enabled=c["dtype"] == "bf16")


def step():
    with autocast:
        loss = run(ids, labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


print("ready", torch.__version__, flush=True)


def cpu():
    r = resource.getrusage(resource.RUSAGE_SELF)
    return r.ru_utime + r.ru_stime


for line in sys.stdin:
    n = int(line)
    begin, used = time.perf_counter(), cpu()
    losses = [step() for _ in range(n)]
    took, used = time.perf_counter() - begin, cpu() - used
    print(took / n, used / n, *losses, flush=True)
