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

Models with experts have tensors by the names that save_pretrained writes, which are not those in
memory, and routing.LAYER: the experts of each token, by number. Scores that are too close to choose
between by rounding, and experts without tokens, are an error.

The families of issue 4 have more. curve.* are 20 steps of torch.optim.AdamW in f32: ids, labels,
the rate, the loss and the norm of the gradients of each step. bf16.error.* say how far logits and
gradients of the whole model in bf16 are from those above, relative and by Frobenius norm;
autocast.error.* the same for f32 under torch.autocast. The weights are numbers of bf16.
"""

import copy
import json
import math
import os
import shutil
import sys
import tempfile
import zlib

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
torch.set_num_threads(1)

HERE = os.path.dirname(os.path.abspath(__file__))
BATCH, SEQ = 2, 11
STEPS, WARMUP, PEAK, FLOOR, DECAY, CLIP = 20, 5, 3e-3, 3e-4, 0.1, 1.0
CURVES = ["llama3", "qwen3", "mistral", "gemma2", "gpt2", "phi3"]

small = dict(vocab_size=47, hidden_size=24, intermediate_size=28, num_hidden_layers=3,
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
    "gpt2": ("gpt2", dict(vocab_size=47, n_embd=18, n_layer=3, n_head=3, n_positions=16,
        bos_token_id=46, eos_token_id=46, initializer_range=0.2, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0)),
    "nemotron": ("nemotron", small | dict(num_hidden_layers=2, head_dim=8)),
}
FIRST = sorted(MODELS)

# Models since then, whose seed is made of their name.
latent = small | dict(num_hidden_layers=2, num_key_value_heads=4, first_k_dense_replace=2, q_lora_rank=14,
                      kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=7)
MODELS |= {
    "qwen3_yarn": ("qwen3", small | dict(num_hidden_layers=2, head_dim=16, rope_parameters=dict(
        rope_type="yarn", rope_theta=500.0, factor=4.0, beta_fast=4.0, beta_slow=1.0, truncate=False,
        original_max_position_embeddings=16))),
    "deepseek_v3_dense": ("deepseek_v3", latent | dict(attention_bias=True, rope_parameters=dict(
        rope_type="yarn", rope_theta=1000.0, factor=8.0, beta_fast=8.0, beta_slow=1.0, mscale=0.7,
        mscale_all_dim=1.2, original_max_position_embeddings=8))),
    "deepseek_v3_plain": ("deepseek_v3", latent | dict(q_lora_rank=None, rope_interleave=False, v_head_dim=18)),
}

few = small | dict(hidden_size=16, num_hidden_layers=2, num_experts_per_tok=2, router_aux_loss_coef=0.0)

EXPERTS = {
    "mixtral": ("mixtral", few | dict(num_local_experts=4, intermediate_size=12)),
    "qwen3_moe": ("qwen3_moe", few | dict(num_experts=6, moe_intermediate_size=10, intermediate_size=14,
        num_experts_per_tok=3, head_dim=6, norm_topk_prob=True, num_hidden_layers=3, mlp_only_layers=[0])),
    "olmoe": ("olmoe", few | dict(num_experts=4, intermediate_size=14, clip_qkv=1.25)),
    "gpt_oss": ("gpt_oss", few | dict(num_local_experts=4, intermediate_size=10, num_hidden_layers=4, head_dim=8,
        sliding_window=4, swiglu_limit=0.75, rope_parameters=dict(rope_type="yarn", rope_theta=150.0, factor=4.0,
            beta_fast=4.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=16))),
    "deepseek_v3": ("deepseek_v3", {k: v for k, v in few.items() if k != "router_aux_loss_coef"} | dict(
        num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        n_shared_experts=2, moe_intermediate_size=8, intermediate_size=14, first_k_dense_replace=1,
        num_hidden_layers=3, q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6,
        v_head_dim=5, rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, beta_fast=4.0,
            beta_slow=1.0, mscale=1.0, mscale_all_dim=0.8, original_max_position_embeddings=16))),
}
MODELS |= EXPERTS
RETRIES = {"deepseek_v3": 15, "gpt_oss": 5}  # added to seeds, where routing finds fault with earlier ones


def make(name):
    kind, keys = MODELS[name]
    torch.manual_seed(1 + FIRST.index(name) if name in FIRST else zlib.crc32(name.encode()) + RETRIES.get(name, 0))
    # transformers keeps the row of a padding token out of the gradient, so there must be none.
    config = AutoConfig.for_model(kind, **keys, pad_token_id=None)
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for k, p in model.named_parameters():
            if p.dim() == 1 or k.endswith("_bias"):
                p.add_(torch.randn_like(p) * 0.2)
            p.copy_(p.bfloat16().float())  # so that f32 and bf16 models have the same weights
        for k, b in model.named_buffers():
            if k.endswith("correction_bias"):
                b.copy_((torch.randn_like(b) * 0.1 - 0.75).bfloat16().float())  # scores below 0 are chosen, too
    weights = {k: v.detach().clone().float() for k, v in model.named_parameters()}
    if name in EXPERTS:
        weights = saved(model)
    single = copy.deepcopy(model)
    model = model.double()
    ids, labels = batch(config.vocab_size)
    labels[1, 3:5] = -100
    logits, loss, grads = gradients(model, ids, labels)
    want = {"ids": ids.int(), "labels": labels.int(), "logits": logits.float(), "loss": loss.double()}
    if name in EXPERTS:
        want |= routing(model, ids)
        slopes = copy.deepcopy(single)
        for k, p in slopes.named_parameters():
            p.data = grads[k].float()
        grads = {k: g for k, g in saved(slopes).items() if not k.endswith("correction_bias")}
    want |= {"grad." + k: g.float() for k, g in grads.items()}
    if name in CURVES:
        want |= curve(copy.deepcopy(single))
        want |= rounded("autocast", single, ids, labels, logits, grads)
        want |= rounded("bf16", single.bfloat16(), ids, labels, logits, grads)
    text = json.loads(config.to_json_string(use_diff=False))
    text.pop("_attn_implementation", None)
    text.pop("_experts_implementation", None)
    return text, {k: v.contiguous() for k, v in weights.items()}, {k: v.contiguous() for k, v in want.items()}


def saved(model):
    with tempfile.TemporaryDirectory() as d:
        model.save_pretrained(d)
        return load_file(os.path.join(d, "model.safetensors"))


def routing(model, ids):
    chosen = {}

    def keep(layer):
        def hook(module, _, out):
            logits, _, places = out
            scores = logits if not hasattr(module, "e_score_correction_bias") else (
                logits.sigmoid() + module.e_score_correction_bias)
            gaps = scores.sort().values.diff().min()
            if gaps < 1e-4:
                sys.exit(f"scores of experts are {gaps:.1e} apart; take another seed")
            if len(places.unique()) < scores.shape[-1]:
                sys.exit(f"experts {places.unique().tolist()} alone have tokens; take another seed")
            chosen[f"routing.{layer}"] = places.sort().values.reshape(*ids.shape, -1).int()
        return hook

    hooks = [m.register_forward_hook(keep(i)) for i, layer in enumerate(model.model.layers)
             for m in layer.modules() if type(m).__name__.lower().endswith("topkrouter")]
    forward(model, ids, ids)
    for hook in hooks:
        hook.remove()
    return chosen


def batch(vocab):
    ids = torch.randint(0, vocab, (BATCH, SEQ))
    return ids, torch.cat([ids[:, 1:], torch.full((BATCH, 1), -100)], 1)


def forward(model, ids, labels):
    logits = model(input_ids=ids, use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return logits, torch.nn.functional.cross_entropy(wide.flatten(0, 1), labels.flatten())


def gradients(model, ids, labels):
    model.zero_grad()
    logits, loss = forward(model, ids, labels)
    loss.backward()
    return logits.detach(), loss.detach().reshape(1), {k: p.grad for k, p in model.named_parameters()}


def rounded(prefix, model, ids, labels, truth, exact):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=prefix == "autocast"):
        logits, _, grads = gradients(model, ids, labels)
    errors = {"logits": (logits, truth)} | {"grad." + k: (g, exact[k]) for k, g in grads.items()}
    return {f"{prefix}.error.{k}": ((a.double() - b).norm() / b.norm()).float().reshape(1)
            for k, (a, b) in errors.items()}


def rate(step):  # as optim.WarmupCosine
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def curve(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=DECAY), dict(params=others, weight_decay=0.0)],
                                  betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    # Few batches, seen again and again, so that there is something to learn.
    batches = [batch(model.config.vocab_size) for _ in range(4)]
    lists = {"ids": [], "labels": [], "rate": [], "loss": [], "norm": []}
    for step in range(STEPS):
        ids, labels = batches[step % len(batches)]
        _, loss, _ = gradients(model, ids, labels)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=False)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        for k, v in zip(lists, (ids.int(), labels.int(), torch.tensor(rate(step)), loss[0], norm)):
            lists[k].append(v)
    return {"curve." + k: torch.stack(v) for k, v in lists.items()}


def written(folder, want):
    with tempfile.TemporaryDirectory() as d:
        shutil.copy(os.path.join(folder, "written.json"), os.path.join(d, "config.json"))
        shutil.copy(os.path.join(folder, "model.safetensors"), d)
        model = AutoModelForCausalLM.from_pretrained(d, attn_implementation="eager", dtype=torch.float32)
    model.config._experts_implementation = "eager"
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
                # Errors of rounding, and steps of training, show how a processor multiplies.
                if far > (0.1 if ".error." in k else 1e-5 if k.startswith("curve.") else 1e-6):
                    sys.exit(f"{path}: {k} is off by {far:.2g}")
        if (far := written(folder, want)) > 1e-6:
            sys.exit(f"{name}: with written.json the logits are off by {far:.2g}")
    if check:
        print(f"all fixtures hold; the largest relative difference is {worst:.2g}")


main()
