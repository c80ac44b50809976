"""Makes the fixtures of package optim: parameters that PyTorch's optimizers moved by given
gradients. Run it with torch 2.15.0:

    python make.py            # writes NAME.safetensors beside this file
    python make.py --check    # computes again and compares with what is there

A fixture has the gradients of every step (g.STEP.NAME, counted from 1), the parameters before the
first (0.NAME) and after each (STEP.NAME), the rates and the gradients' norms. muon.safetensors was
made with torch.optim.Muon made to multiply in f32, muon_bf16.safetensors with it as it is. Names
that end in a number are layers of a stack.
"""

import os
import sys

import torch
from safetensors.torch import load_file, save_file

HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = {
    "embed": (11, 6), "q.0": (6, 10), "q.1": (6, 10), "o.0": (10, 6), "o.1": (10, 6),
    "up.0": (6, 9), "up.1": (6, 9), "norm": (6,),
}
MATRICES = [k for k in SHAPES if k[-1].isdigit()]


def rate(step, steps):
    return 0.02 * min(step / 3, 1) * (1 - 0.5 * step / steps)


def adamw(params):
    kw = dict(lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    return torch.optim.AdamW([
        dict(params=[p for p in params.values() if p.dim() > 1], weight_decay=0.1),
        dict(params=[p for p in params.values() if p.dim() == 1], weight_decay=0.0)], **kw)


def run(steps, muon):
    torch.manual_seed(7)
    params = {k: torch.nn.Parameter(torch.randn(s)) for k, s in SHAPES.items()}
    out = {"0." + k: p.detach().clone() for k, p in params.items()}
    if muon:
        optimizers = [
            torch.optim.Muon([params[k] for k in MATRICES], lr=1.0, weight_decay=0.1, momentum=0.95,
                             nesterov=True, adjust_lr_fn="match_rms_adamw"),
            adamw({k: p for k, p in params.items() if k not in MATRICES})]
    else:
        optimizers = [adamw(params)]
    rates, norms = [], []
    for step in range(1, steps + 1):
        for k, p in params.items():
            # Sizes differ by step, so that some steps are clipped and others are not.
            p.grad = torch.randn_like(p) * (0.02 if step % 3 else 0.3)
            out[f"g.{step}.{k}"] = p.grad.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), 1.0, foreach=False))
        rates.append(rate(step, steps))
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = rates[-1]
            o.step()
        out |= {f"{step}.{k}": p.detach().clone() for k, p in params.items()}
    return out | {"rates": torch.tensor(rates), "norms": torch.stack(norms).detach()}


def main():
    fixtures = {"adamw": run(20, muon=False), "muon_bf16": run(5, muon=True)}
    torch.bfloat16, bf16 = torch.float32, torch.bfloat16  # the type that Muon multiplies in
    fixtures["muon"] = run(5, muon=True)
    torch.bfloat16 = bf16
    worst = 0.0
    for name, tensors in fixtures.items():
        path = os.path.join(HERE, name + ".safetensors")
        if "--check" not in sys.argv:
            save_file(tensors, path)
            continue
        old = load_file(path)
        if sorted(old) != sorted(tensors):
            sys.exit(f"{path}: other tensors")
        # Another processor's bf16 products may round otherwise.
        limit = 1e-2 if name == "muon_bf16" else 1e-6
        for k, v in tensors.items():
            far = ((old[k] - v).norm() / v.norm()).item()
            worst = max(worst, far)
            if far > limit:
                sys.exit(f"{path}: {k} is off by {far:.2g}")
    if "--check" in sys.argv:
        print(f"all fixtures hold; the largest relative difference is {worst:.2g}")


main()
