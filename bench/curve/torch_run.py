"""Trains in PyTorch what `deepwell train` trained: the same weights, batches, rates and rules, in
f32. Prints a line of CSV for each step: step (counted from 1), loss, norm of the gradients.

    python torch_run.py FOLDER [--steps N] [--threads 2] > torch.csv

FOLDER has
    init/         the first weights as transformers loads them: config.json, model.safetensors
    run.json      steps, batch and seq; rates, a number for each step; beta1, beta2, eps, decay, clip
    batches.bin   for each step ids, labels, positions and segments, each batch x seq int32, little
                  endian; a label is the token that follows, or negative where nothing is learned
Weights with more than one dimension decay. The loss is the mean over the labels of a step.
"""

import argparse
import json
import os

import numpy
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder")
parser.add_argument("--steps", type=int, help="stop after so many")
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()

torch.set_num_threads(args.threads)
logging.disable_progress_bar()
with open(os.path.join(args.folder, "run.json")) as f:
    run = json.load(f)
model = AutoModelForCausalLM.from_pretrained(
    os.path.join(args.folder, "init"), attn_implementation="eager", dtype=torch.float32).train()
if getattr(model.config, "sliding_window", None):
    raise SystemExit("the mask below has no window: take a model without one")
batches = numpy.memmap(os.path.join(args.folder, "batches.bin"), dtype="<i4", mode="r",
                       shape=(run["steps"], 4, run["batch"], run["seq"]))

matrices = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW(
    [dict(params=matrices, weight_decay=run["decay"]), dict(params=others, weight_decay=0.0)],
    betas=(run["beta1"], run["beta2"]), eps=run["eps"], foreach=False, fused=False)
causal = torch.ones(run["seq"], run["seq"], dtype=torch.bool).tril()

print("step,loss,norm", flush=True)
for step in range(min(args.steps or run["steps"], run["steps"])):
    ids, labels, positions, segments = torch.from_numpy(batches[step].astype("int64"))
    # A token sees those before it in its own document.
    sees = causal & (segments[:, :, None] == segments[:, None, :])
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]
    logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.clamp(min=-1).flatten(), ignore_index=-1)
    optimizer.zero_grad()
    loss.backward()
    if run["clip"] > 0:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run["clip"])
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for group in optimizer.param_groups:
        group["lr"] = run["rates"][step]
    optimizer.step()
    print(f"{step + 1},{loss.item():.9g},{norm.item():.9g}", flush=True)
