"""Makes operators.pt2.gz and operators.safetensors.gz beside this file: the cases of cases.py as one
exported program, and what eager PyTorch gives for them. Run it with torch 2.15.0:

    python make.py            # writes both
    python make.py --check    # exports and computes again, and compares with what is there

The safetensors have the inputs in0 and so on, out.NUMBER.CASE, and grad.PARAMETER, as f32. The gradients are of all
outputs with a fraction that are finite, element i of each with the weight (i mod 7 - 3) / 4.
"""

import gzip
import io
import os
import sys
import warnings

import torch
from safetensors.torch import load, save

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import cases  # noqa: E402

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


def weights(t):
    return ((torch.arange(t.numel()) % 7 - 3) / 4).view(t.shape).to(t.dtype)


def weighed(results):
    """Gives the sum whose gradients are compared."""
    return sum((t * weights(t)).sum() for r in results for t in r if t.requires_grad)


def computed(module):
    results = module(*module.inputs())
    weighed(results).backward()
    have = {f"in{k}": t.float() for k, t in enumerate(module.inputs())}
    flat = [(name, t) for (name, *_), r in zip(module.cases, results) for t in r]
    have |= {f"out.{k:04}.{name}": t.detach().float().contiguous().clone() for k, (name, t) in enumerate(flat)}
    return have | {f"grad.{n}": p.grad.float().contiguous().clone() for n, p in module.named_parameters() if p.grad is not None}


def exported(module):
    program = torch.export.export(module.train(), module.inputs(), strict=False)
    for n in program.graph.nodes:
        n.meta.pop("stack_trace", None)
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue(), {str(n.target) for n in program.graph.nodes if n.op == "call_function"}


def main():
    module = cases.Cases()
    program, operators = exported(module)
    have = computed(module)
    print(f"{len(module.cases)} cases of {len(operators)} operators, {len(have)} tensors")
    path = os.path.join(HERE, "operators.")
    if "--check" in sys.argv:
        with gzip.open(path + "safetensors.gz") as f:
            want = load(f.read())
        assert want.keys() == have.keys(), want.keys() ^ have.keys()
        for name, t in want.items():
            torch.testing.assert_close(have[name], t, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m: f"{name}: {m}")
        return print("as they are")
    for name, data in ("pt2.gz", program), ("safetensors.gz", save(have)):
        with open(path + name, "wb") as f:
            f.write(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
