"""Checks what package capture reads and writes against transformers. Run it with torch 2.15.0 and
transformers 5.22.2, and go on the path:

    python make.py            # writes fp8 and mxfp4 beside this file
    python make.py --check

The tiny models of model/testdata are loaded by transformers and saved in shards, read and exported
again by the Go package (its test TestOracle), and loaded by transformers: the weights and the
logits in f32 must be the same bits, and weights in bf16 and f16 those that torch rounds to.

fp8 and mxfp4 are models whose weights have scales, as DeepSeek-V3 and gpt-oss are published, with
expected.safetensors: the same in f32, as transformers brings them there, without MTP. Of FP8 it reads blocks
that divide the matrix alone; torch repeats scales for those at the edge.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

logging.disable_progress_bar()

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)
MODELS = os.path.join(os.path.dirname(PACKAGE), "model", "testdata")


def load(folder, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            sys.exit(f"{folder}: {what} {info[what]}")
    model.config._experts_implementation = "eager"  # the default wants rows of 16 bytes
    return model.eval()


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


small = dict(vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
             num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None)
BLOCK = (8, 6)
SCALED = {
    "fp8": ("deepseek_v3", small | dict(n_routed_experts=2, n_group=1, topk_group=1, moe_intermediate_size=12,
        intermediate_size=18, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=6, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=5), dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic",
        weight_block_size=BLOCK)),
    "mxfp4": ("gpt_oss", small | dict(hidden_size=32, intermediate_size=64, num_local_experts=3, head_dim=4,
        layer_types=["full_attention"] * 2, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
        dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])),
}


def fp8(name, w):
    rows, cols = ((n + b - 1) // b for n, b in zip(w.shape, BLOCK))
    wide = torch.zeros(rows * BLOCK[0], cols * BLOCK[1])
    wide[:w.shape[0], :w.shape[1]] = w
    scale = wide.reshape(rows, BLOCK[0], cols, BLOCK[1]).abs().amax((1, 3)) / 448

    def whole(s):
        return s.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:w.shape[0], :w.shape[1]]

    q = (w / whole(scale)).to(torch.float8_e4m3fn)
    back = q.float() * whole(scale)
    if wide.shape == w.shape and not equal(back, Fp8Dequantize(None)._dequantize_one(q, scale, torch.float32)):
        sys.exit(f"{name}: transformers reads something else")
    return {name: q, name + "_scale_inv": scale}, {name: back}


def mxfp4(name, w):
    count, cols, rows = w.shape  # the blocks are [out, in]
    blocks = torch.randint(0, 256, (count, rows, cols // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (count, rows, cols // 32), dtype=torch.uint8)
    back = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {name + "_blocks": blocks, name + "_scales": scales}, {name: back}


def scaled(name):
    kind, keys, quantized = SCALED[name]
    torch.manual_seed(len(name))
    config = AutoConfig.for_model(kind, **keys)
    with tempfile.TemporaryDirectory() as d:
        AutoModelForCausalLM.from_config(config).save_pretrained(d)
        plain = load_file(os.path.join(d, "model.safetensors"))
    files, want = {}, {}
    for k, w in sorted(plain.items()):
        one = ({k: w}, {k: w})
        if name == "fp8" and w.dim() == 2 and "layers" in k and ".gate.weight" not in k:
            one = fp8(k, w)
        if name == "mxfp4" and w.dim() == 3:
            one = mxfp4(k, w)
        files, want = files | one[0], want | one[1]
    if name == "fp8":  # of a layer that predicts a second token, which is not taken
        files |= fp8("model.layers.2.eh_proj.weight", torch.randn(16, 32))[0]
    text = json.loads(config.to_json_string(use_diff=False)) | dict(quantization_config=quantized)
    return text, files, {k: v.contiguous() for k, v in want.items()}


def fixtures(check):
    for name in SCALED:
        text, files, want = scaled(name)
        folder = os.path.join(HERE, name)
        if not check:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, "config.json"), "w") as f:
                f.write(json.dumps(text, indent=1, sort_keys=True) + "\n")
        for file, tensors in (("model", files), ("expected", want)):
            path = os.path.join(folder, file + ".safetensors")
            if not check:
                save_file(tensors, path, metadata={"format": "pt"})
                os.chmod(path, 0o644)
                continue
            old = load_file(path)
            if sorted(old) != sorted(tensors) or not all(equal(old[k], v) for k, v in tensors.items()):
                sys.exit(f"{path}: other tensors")


def plain(folder, name):
    """An export of weights with scales is a model of what transformers brings them to."""
    os.makedirs(os.path.join(folder, "want"))
    shutil.copy(os.path.join(HERE, name, "expected.safetensors"), os.path.join(folder, "want", "model.safetensors"))
    with open(os.path.join(HERE, name, "config.json")) as f:
        config = {k: v for k, v in json.load(f).items() if k != "quantization_config"}
    with open(os.path.join(folder, "want", "config.json"), "w") as f:
        json.dump(config, f)
    want, got = (load(os.path.join(folder, kind), torch.float32) for kind in ("want", "f32"))
    ids = torch.randint(0, want.config.vocab_size, (2, 11))
    with torch.no_grad():
        if not equal(want(input_ids=ids).logits, got(input_ids=ids).logits):
            sys.exit(f"{name}: logits differ")


def main():
    fixtures("--check" in sys.argv)
    if "--check" not in sys.argv:
        return
    torch.manual_seed(1)
    torch.set_num_threads(1)
    names = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(os.path.join(MODELS, "*", "config.json")))
    with tempfile.TemporaryDirectory() as d:
        for name in names:
            load(os.path.join(MODELS, name), torch.float32).save_pretrained(
                os.path.join(d, name, "in"), max_shard_size="30KB")
        for name in SCALED:
            os.makedirs(os.path.join(d, name, "in"))
            for file in ("config.json", "model.safetensors"):
                shutil.copy(os.path.join(HERE, name, file), os.path.join(d, name, "in"))
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
                    # gpt-oss keeps norms in f32, whatever the file has.
                    if not equal(v.detach().to(dtype), weights[k].detach().to(dtype)):
                        sys.exit(f"{name}: {k} differs in {kind}")
        for name in SCALED:
            plain(os.path.join(d, name), name)
    print(f"{len(names) + len(SCALED)} exports give the same logits, bit for bit, and the same weights in f32, bf16 and f16")


main()
