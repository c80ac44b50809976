"""Times of operations by torch.compile(mode="max-autotune") in bfloat16.

Standard input has {"device": ..., "cases": [...]}, standard output {"Version", "Why", "Seconds"}.
"""

import json
import sys
import time


def main():
    order = json.load(sys.stdin)
    try:
        import torch
    except ImportError as e:
        return {"Why": f"this Python has no torch: {e}"}
    device = order["device"]
    if device == "cuda" and not torch.cuda.is_available():
        return {"Why": f"torch {torch.__version__} sees no GPU"}
    bench = Bench(torch, device)
    seconds = [bench.time(c) if c["kind"] else 0.0 for c in order["cases"]]
    return {"Version": torch.__version__, "Seconds": seconds}


class Bench:
    def __init__(self, torch, device):
        self.torch, self.device = torch, device

    def tensor(self, *shape, grad=False):
        t = self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16)
        return t.requires_grad_(grad)

    def time(self, c):
        """The best of ten calls, after what compiles and tunes."""
        call = getattr(self, c["kind"])(c)
        for _ in range(3):
            call()
        best = float("inf")
        for _ in range(10):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            best = min(best, time.perf_counter() - start)
        return best

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def compiled(self, f):
        if self.device != "cuda":  # for form: what takes minutes on a CPU says nothing of a GPU
            return self.torch.compile(f, backend="eager")
        return self.torch.compile(f, mode="max-autotune")

    def gemm(self, c):
        x, w = self.tensor(c["m"], c["k"]), self.tensor(c["n"], c["k"])
        f = self.compiled(self.torch.nn.functional.linear)
        return lambda: f(x, w)

    def attend(self, q, k, v):
        return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                     enable_gqa=True)

    def attention(self, c):
        q = self.tensor(1, c["heads"], c["seq"], c["head"], grad=True)
        k, v = (self.tensor(1, c["kv_heads"], c["seq"], c["head"], grad=True) for _ in range(2))
        f, seed = self.compiled(self.attend), self.tensor(1, c["heads"], c["seq"], c["head"])
        return lambda: self.torch.autograd.grad(f(q, k, v), (q, k, v), seed)

    def layer(self, c):
        return self.block(c, self.mlp(c))

    def moe(self, c):
        return self.block(c, self.experts(c))

    def block(self, c, mlp):
        """A layer of Llama: norm, attention with rotary positions, norm, and an MLP."""
        torch, functional = self.torch, self.torch.nn.functional
        wide, kv = c["heads"] * c["head"], c["kv_heads"] * c["head"]
        forward, weights = mlp
        wq, wk, wv = (self.tensor(n, c["hidden"], grad=True) for n in (wide, kv, kv))
        wo = self.tensor(c["hidden"], wide, grad=True)
        norms = [self.tensor(c["hidden"], grad=True) for _ in range(2)]
        angle = torch.outer(torch.arange(c["seq"], device=self.device),
                            10000.0 ** (-torch.arange(0, c["head"], 2, device=self.device) / c["head"]))
        cos, sin = (f(torch.cat((angle, angle), -1)).bfloat16() for f in (torch.cos, torch.sin))

        def rotate(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat((-b, a), -1) * sin

        def norm(x, w):
            y = x.float()
            return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16() * w

        def heads(x):
            return x.view(1, c["seq"], -1, c["head"]).transpose(1, 2)

        def layer(x):
            y = norm(x, norms[0])
            q, k, v = (heads(functional.linear(y, w)) for w in (wq, wk, wv))
            y = self.attend(rotate(q), rotate(k), v).transpose(1, 2).reshape(1, c["seq"], wide)
            x = x + functional.linear(y, wo)
            return x + forward(norm(x, norms[1]))

        f = self.compiled(layer)
        x, seed = self.tensor(1, c["seq"], c["hidden"], grad=True), self.tensor(1, c["seq"], c["hidden"])
        inputs = (x, wq, wk, wv, wo, *norms, *weights)
        return lambda: torch.autograd.grad(f(x), inputs, seed)

    def mlp(self, c):
        functional = self.torch.nn.functional
        gate, up = (self.tensor(c["mlp"], c["hidden"], grad=True) for _ in range(2))
        down = self.tensor(c["hidden"], c["mlp"], grad=True)

        def forward(x):
            return functional.linear(
                functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)

        return forward, (gate, up, down)

    def experts(self, c):
        """Rows in the order of experts, the mean for each, as batched GEMMs: without a graph break."""
        torch, functional = self.torch, self.torch.nn.functional
        router = self.tensor(c["experts"], c["hidden"], grad=True)
        gate, up = (self.tensor(c["experts"], c["mlp"], c["hidden"], grad=True) for _ in range(2))
        down = self.tensor(c["experts"], c["hidden"], c["mlp"], grad=True)

        def forward(x):
            rows = x.reshape(-1, c["hidden"])
            share, chosen = functional.linear(rows, router).float().softmax(-1).topk(c["top"])
            order = chosen.reshape(-1).argsort()
            each = order.numel() // c["experts"]
            order = order[: each * c["experts"]]
            token = order // c["top"]
            took = rows[token].view(c["experts"], each, -1)
            y = functional.silu(took @ gate.transpose(1, 2)) * (took @ up.transpose(1, 2))
            y = (y @ down.transpose(1, 2)).reshape(-1, c["hidden"])
            y = y * share.reshape(-1)[order, None].bfloat16()
            return torch.zeros_like(rows).index_add(0, token, y).view_as(x)

        return forward, (router, gate, up, down)


print(json.dumps(main()))
