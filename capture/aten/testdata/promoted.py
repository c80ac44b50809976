"""Writes numbers.pt2.gz and numbers.safetensors.gz beside this file: cases of types that torch
promotes, of powers, limits and counts, and what eager PyTorch gives for them (torch 2.15.0)."""

import gzip
import io
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save

HERE = os.path.dirname(os.path.abspath(__file__))


class Numbers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 2, padding_idx=0)

    def forward(self, x, i):
        y = x * 1e8
        return (self.table(i).sum(), (x > 0).sum(-1), x.sum(dim=[]), i / 4, i * 0.5, i + 0.5, 0.5 - i, i / (i + 1),
                (i < 2.5).float(), (i > 0) * 3, x**-1, x**-2, x**3, x**4, (x * x) ** 0.5, (x * x) ** -0.5,
                y.clamp(-1, 1), y.clamp(max=2), i.clamp(1, 3), F.gelu(y), F.gelu(x),
                x.masked_fill(x > 0, -torch.inf).exp(), x.masked_fill(x > 0, -torch.inf) * 0.125)


torch.manual_seed(0)
module, inputs = Numbers(), (torch.arange(8.0).view(2, 4) - 3.5, torch.arange(8).view(2, 4))
program = torch.export.export(module, inputs)
for n in program.graph.nodes:
    n.meta.pop("stack_trace", None)
outputs = module(*inputs)
outputs[0].backward()
have = {"x": inputs[0], "i": inputs[1], "grad": module.table.weight.grad}
have |= {f"out{k:02}": o.detach().float().contiguous() for k, o in enumerate(outputs)}
file = io.BytesIO()
torch.export.save(program, file)
for name, data in ("numbers.pt2", file.getvalue()), ("numbers.safetensors", save(have)):
    with open(os.path.join(HERE, name + ".gz"), "wb") as f:
        f.write(gzip.compress(data, mtime=0))
