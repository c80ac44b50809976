"""Hand-written models for make.py. Each returns logits and the mean cross-entropy."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, EMBED, HEADS, LAYERS, CONTEXT = 40, 32, 4, 2, 32


class Attention(nn.Module):
    def __init__(self, kind="sdpa", dropout=0.0):
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(EMBED, 3 * EMBED, bias=False)
        self.out = nn.Linear(EMBED, EMBED, bias=False)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).tril().bool(), persistent=False)
        if kind == "alibi":
            slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)])
            distance = torch.arange(CONTEXT)[None, :] - torch.arange(CONTEXT)[:, None]
            self.register_buffer("bias", slopes[:, None, None] * distance)

    def forward(self, x):
        b, t, _ = x.shape
        if self.kind == "einsum":
            q, k, v = (y.view(b, t, HEADS, -1) for y in self.qkv(x).split(EMBED, -1))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(EMBED // HEADS)
            scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
            y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
            return self.out(y.reshape(b, t, EMBED))
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) * (EMBED // HEADS) ** -0.5
            if self.kind == "alibi":
                scores = scores + self.bias[:, :t, :t]
            scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
            y = self.drop(scores.softmax(-1)) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, EMBED))


class Wave(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x * x / (1 + x), 0.1 * torch.sin(x))


class Block(nn.Module):
    def __init__(self, kind="sdpa", order="pre", act=None, dropout=0.0):
        super().__init__()
        self.order = order
        self.ln_1, self.ln_2 = nn.LayerNorm(EMBED), nn.LayerNorm(EMBED)
        self.attn = Attention(kind, dropout)
        self.mlp = nn.Sequential(nn.Linear(EMBED, 2 * EMBED), act or nn.GELU(), nn.Linear(2 * EMBED, EMBED))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        if self.order == "parallel":
            return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))
        if self.order == "post":
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.mlp(x))
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, tied=False, positions=True, dropout=0.0, **block):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, EMBED)
        self.wpe = nn.Embedding(CONTEXT, EMBED) if positions else None
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(dropout=dropout, **block) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(EMBED)
        self.lm_head = nn.Linear(EMBED, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, labels):
        x = self.wte(input_ids)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.drop(x)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Storages(nn.Module):
    """Views, shared and expanded storages, and every element type that a file can hold."""

    def __init__(self):
        super().__init__()
        whole = torch.arange(60, dtype=torch.float32) / 8
        self.turned = nn.Parameter(whole[:24].view(4, 6).t())
        self.first = nn.Parameter(whole[12:24].view(3, 4))
        self.second = nn.Parameter(whole[36:60:2].view(3, 4))
        self.again = self.second
        self.register_buffer("wide", torch.tensor([1.0, -2.0])[:, None].expand(2, 5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(2.5, dtype=torch.float64))
        for t in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bool, torch.bfloat16,
                  torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2):
            self.register_buffer(str(t).replace("torch.", "t_"), torch.tensor([0, 1, 3, 96]).to(t))
        self.constant = torch.tensor([float("inf"), 1.0, 2.0])

    def forward(self, x):
        with torch.no_grad():
            angle = torch.arange(x.shape[0]).float().cos()
        y = x @ self.turned @ self.second.t() + self.again[0, 0] + self.first.sum() + self.wide.sum() + self.scalar.float()
        y = y.masked_fill(angle[:, None] > 1, float("-inf")) + self.constant.clamp(max=3.0)
        low, high = y.topk(2).values.chunk(2, -1)
        return {"pair": (low, high[:, 0]), "size": 2 * x.shape[0]}


class Editor(nn.Module):
    """Changes in place, through views and of what views show."""

    def forward(self, x):
        b, t, _ = x.shape
        y = x * 1.0
        heads = y.view(b, t, HEADS, -1)
        last, turned = heads[:, :, -1], y.transpose(1, 2)
        y[..., :8].mul_(0.5)
        last.add_(heads[:, :, 0])
        turned[:, 4:6].copy_(x.transpose(1, 2)[:, 10:12])
        heads[:, :, 1, ::2] = (2 * last[..., ::2]).sin()
        high = y.narrow(-1, 16, 16)
        y[..., 12:14].add_(high[..., 2:4])
        heads[..., 3] = 0.25
        y[:, :, torch.tensor([9, 2, 30])] = x[..., 1:4]
        turned.index_add_(1, torch.tensor([1, 5, 1]), x.transpose(1, 2)[:, 6:9])
        y.masked_fill_(x > 2, 0.125)
        total = torch.empty_like(y)
        total[..., :16], total[..., 16:] = high, torch.cat([last, last], -1)
        return y.add(total, alpha=0.5).index_select(2, torch.arange(EMBED - 1, -1, -1))


def with_acts(act, **block):
    model = GPT(**block)
    for b in model.h:
        b.mlp[1] = act()
    return model


MODELS = {
    "nanogpt": lambda: GPT(),
    "tied": lambda: GPT(tied=True),
    "alibi": lambda: GPT(kind="alibi", positions=False),
    "einsum": lambda: GPT(kind="einsum"),
    "parallel": lambda: GPT(order="parallel"),
    "postnorm": lambda: GPT(order="post"),
    "activation": lambda: GPT(act=Wave()),
    "inplace": lambda: with_acts(lambda: nn.Sequential(nn.Linear(2 * EMBED, EMBED), Editor(), nn.Linear(EMBED, 2 * EMBED))),
    "dropout0": lambda: GPT(kind="matmul", dropout=0.0),
    "dropout": lambda: GPT(kind="matmul", dropout=0.25),
}


def words(vocab, layers=LAYERS, context=CONTEXT, **keys):
    """A GPT with another number of tokens and of layers, or for longer sequences."""
    model = GPT(**keys)
    model.wte, model.lm_head = nn.Embedding(vocab, EMBED), nn.Linear(EMBED, vocab, bias=False)
    model.lm_head.weight = model.wte.weight
    model.wpe = nn.Embedding(context, EMBED)
    model.register_buffer("version", torch.tensor(3))  # part of the state_dict, and used by nothing
    model.h.extend(Block() for _ in range(layers - LAYERS))
    return model


# Exported like the others, and not compared with eager PyTorch: for the command, and without values
# for its compile time.
CONTEXTS = {"words": 128}
PROGRAMS = {
    "words": lambda: words(320, context=CONTEXTS["words"]),
    "deep4": lambda: words(VOCAB, layers=4),
    "deep64": lambda: words(VOCAB, layers=64),
}


class Odd(nn.Module):
    """A model with a part that is not supported, between its embedding and its output layer."""

    def __init__(self, part):
        super().__init__()
        self.wte, self.part = nn.Embedding(VOCAB, 8), part
        self.lm_head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.part(self.wte(input_ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(8, 8), nn.GRUCell(8, 8)

    def forward(self, x):
        return x + self.gru(self.lstm(x[:, 0])[0])[:, None]


class Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * 2, n=8)


class Polar(nn.Module):
    def forward(self, x):
        z = torch.view_as_complex(x.unflatten(-1, (4, 2)))
        return torch.view_as_real(z * torch.polar(torch.ones(4), torch.arange(4.0))).flatten(-2)


class Sorted(nn.Module):
    def forward(self, x):
        return x.sort(-1).values + x.median(-1, keepdim=True).values + x.argmax(-1, keepdim=True)


class Branch(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


class Product(nn.Module):
    def forward(self, x):
        return x.cumprod(1) + x.cumsum(1) + x.logcumsumexp(1)


@torch.library.custom_op("acme::twist", mutates_args=())
def twist(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


twist.register_fake(lambda x: torch.empty_like(x))


class Custom(nn.Module):
    def forward(self, x):
        return torch.ops.acme.twist(x)


class Quantized(nn.Module):
    def forward(self, x):
        low = (x * 127).round().to(torch.int8)
        return torch.bitwise_left_shift(low, 1).to(x.dtype) + (low // 3).to(x.dtype)


class Noisy(nn.Module):
    def forward(self, x):
        return F.dropout(x + torch.randn_like(x), 0.1) * torch.bernoulli(torch.full_like(x, 0.5))


class Found(nn.Module):
    def forward(self, x):
        rows = x[..., 0].flatten().nonzero()[:, 0]
        return x + x.flatten(0, 1)[rows].mean() + torch.linalg.norm(x, dim=-1, keepdim=True)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean((0, 1)).detach(), alpha=0.1)
        return x - self.mean


PROGRAMS |= {"no_" + part.__name__.lower(): lambda part=part: Odd(part()) for part in (
    Convolution, Recurrent, Fourier, Polar, Sorted, Branch, Product, Custom, Quantized, Noisy, Found, Remembering)}


class Autocast(GPT):
    def forward(self, input_ids, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(input_ids, labels)


MODELS["autocast"] = Autocast
