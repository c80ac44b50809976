"""Checks what package capture reads and writes against transformers. Run it with torch 2.15.0 and
transformers 5.22.2, and go on the path:

    python make.py --check

The tiny models of model/testdata are loaded by transformers and saved in shards, read and exported
again by the Go package (its test TestOracle), and loaded by transformers: the weights and the
logits in f32 must be the same bits, and weights in bf16 and f16 those that torch rounds to. There
are no fixtures to write.
"""

import glob
import os
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)
MODELS = os.path.join(os.path.dirname(PACKAGE), "model", "testdata")


def load(folder, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            sys.exit(f"{folder}: {what} {info[what]}")
    return model.eval()


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    names = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(os.path.join(MODELS, "*", "config.json")))
    with tempfile.TemporaryDirectory() as d:
        for name in names:
            load(os.path.join(MODELS, name), torch.float32).save_pretrained(
                os.path.join(d, name, "in"), max_shard_size="30KB")
        subprocess.run(["go", "test", ".", "-count=1", "-run", "^TestOracle$", "-args", "-oracle", d],
                       cwd=PACKAGE, check=True, stdout=sys.stderr)
        for name in names:
            folder = os.path.join(d, name)
            before = load(os.path.join(folder, "in"), torch.float32)
            ids = torch.randint(0, before.config.vocab_size, (2, 11))
            after = load(os.path.join(folder, "f32"), torch.float32)
            with torch.no_grad():
                want, got = before(input_ids=ids).logits, after(input_ids=ids).logits
            if not equal(want, got):
                sys.exit(f"{name}: logits differ by {(want - got).abs().max():.2g}")
            for kind, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
                weights = dict(load(os.path.join(folder, kind), dtype).named_parameters())
                for k, v in before.named_parameters():
                    if not equal(v.detach().to(dtype), weights[k].detach()):
                        sys.exit(f"{name}: {k} differs in {kind}")
    print(f"{len(names)} exports give the same logits, bit for bit, and the same weights in f32, bf16 and f16")


main()
