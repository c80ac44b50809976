"""Makes the fixtures of package model: tiny random models of each family, and what transformers
computes with them. Run it with torch 2.15.0 and transformers 5.22.2:

    python make.py            # writes NAME/ beside this file
    python make.py --check    # computes again and compares with what is there

--check also loads each model with written.json, the config.json that the Go package writes, and
compares the logits.

A fixture is config.json as transformers writes it, model.safetensors with the weights, and
expected.safetensors with ids, labels, logits, loss and the gradient of every weight (grad.NAME).
Labels stand where the logits they judge stand; -100 has no loss. Products are computed in f64, but
transformers makes angles, norms and softmax in f32 whatever it is told.
"""

import json
import os
import shutil
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
BATCH, SEQ = 2, 11

small = dict(vocab_size=67, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=1, eos_token_id=2, initializer_range=0.2)

MODELS = {
    "llama2": ("llama", small | dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "llama3": ("llama", small | dict(head_dim=8, rms_norm_eps=1e-5, eos_token_id=[2, 3], rope_parameters=dict(
        rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32))),
    "llama_linear": ("llama", small | dict(num_hidden_layers=2, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0))),
    "mistral": ("mistral", small | dict(sliding_window=4, head_dim=10)),
    "qwen2": ("qwen2", small | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("qwen3", small | dict(head_dim=12, num_hidden_layers=4, tie_word_embeddings=True)),
    "gemma2": ("gemma2", small | dict(num_hidden_layers=4, head_dim=8, sliding_window=4,
        query_pre_attn_scalar=12, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "gemma3": ("gemma3_text", small | dict(num_hidden_layers=8, head_dim=6, hidden_size=20,
        intermediate_size=22, sliding_window=4, query_pre_attn_scalar=7, layer_types=[
            "full_attention" if (i + 1) % 3 == 0 else "sliding_attention" for i in range(8)],
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                             sliding_attention=dict(rope_type="default", rope_theta=1e4)))),
    "phi3": ("phi3", small | dict(sliding_window=6, rms_norm_eps=1e-5)),
    "phi3_partial": ("phi3", small | dict(num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, rope_parameters=dict(rope_type="default", rope_theta=1e4,
        partial_rotary_factor=0.75))),
    "gpt2": ("gpt2", dict(vocab_size=67, n_embd=24, n_layer=3, n_head=3, n_positions=16,
        bos_token_id=66, eos_token_id=66, initializer_range=0.2, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0)),
    "nemotron": ("nemotron", small | dict(num_hidden_layers=2, head_dim=8)),
}


def make(name):
    kind, keys = MODELS[name]
    torch.manual_seed(1 + sorted(MODELS).index(name))
    # transformers keeps the row of a padding token out of the gradient, so there must be none.
    config = AutoConfig.for_model(kind, **keys, pad_token_id=None)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
    weights = {k: v.detach().clone().float() for k, v in model.named_parameters()}
    model = model.double()
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQ))
    labels = torch.cat([ids[:, 1:], torch.full((BATCH, 1), -100)], 1)
    labels[1, 3:5] = -100
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, config.vocab_size), labels.reshape(-1))
    loss.backward()
    want = {"ids": ids.int(), "labels": labels.int(), "logits": logits.detach().float(),
            "loss": loss.detach().double().reshape(1)}
    for k, p in model.named_parameters():
        want["grad." + k] = p.grad.float()
    text = json.loads(config.to_json_string(use_diff=False))
    text.pop("_attn_implementation", None)
    return text, {k: v.contiguous() for k, v in weights.items()}, {k: v.contiguous() for k, v in want.items()}


def written(folder, want):
    with tempfile.TemporaryDirectory() as d:
        shutil.copy(os.path.join(folder, "written.json"), os.path.join(d, "config.json"))
        shutil.copy(os.path.join(folder, "model.safetensors"), d)
        model = AutoModelForCausalLM.from_pretrained(d, attn_implementation="eager", dtype=torch.float32)
    logits = model.double().eval()(input_ids=want["ids"].long(), use_cache=False).logits
    return ((logits - want["logits"]).norm() / logits.norm()).item()


def main():
    check = "--check" in sys.argv
    worst = 0.0
    for name in MODELS:
        config, weights, want = make(name)
        folder = os.path.join(HERE, name)
        paths = [os.path.join(folder, f) for f in ("config.json", "model.safetensors", "expected.safetensors")]
        if not check:
            os.makedirs(folder, exist_ok=True)
            with open(paths[0], "w") as f:
                f.write(json.dumps(config, indent=1, sort_keys=True) + "\n")
            save_file(weights, paths[1], metadata={"format": "pt"})
            save_file(want, paths[2])
            continue
        with open(paths[0]) as f:
            if json.load(f) != config:
                sys.exit(f"{name}: config.json differs")
        for path, tensors in ((paths[1], weights), (paths[2], want)):
            old = load_file(path)
            if sorted(old) != sorted(tensors):
                sys.exit(f"{path}: other tensors")
            for k, v in tensors.items():
                far = (old[k].double() - v.double()).norm() / (v.double().norm() + 1e-30)
                worst = max(worst, far.item())
                if far > 1e-6:
                    sys.exit(f"{path}: {k} is off by {far:.2g}")
        if (far := written(folder, want)) > 1e-6:
            sys.exit(f"{name}: with written.json the logits are off by {far:.2g}")
    if check:
        print(f"all fixtures hold; the largest relative difference is {worst:.2g}")


main()
