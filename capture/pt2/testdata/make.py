"""Makes the fixtures of package pt2: small random models as torch.export.save writes them, and what
eager PyTorch computes with them. Run it with torch 2.15.0 and transformers 5.22.2:

    python make.py [NAME ...]    # writes NAME.pt2.gz and NAME.safetensors.gz beside this file
    python make.py --losses [NAME ...]    # writes losses.json: what eager PyTorch trains
    python make.py --check       # exports and computes again, and compares with what is there

Programs are raw, not strict, in train mode, in f32, with dynamic batch and sequence; models of
transformers have the attention and experts of python/deepwell/_export.py, and as NAME_plain.pt2.gz
transformers' own, whose numbers are in NAME.safetensors. Weights are numbers of
bf16, which compress. Machine paths and source lines are taken out of stack traces, and torch's own
writer packs the archive again. torch 2.9.1 wrote NAME_old.pt2.gz (make.py --old DIR, run with it),
which --check leaves alone.

NAME.safetensors holds the inputs by their names, labels included, the eager f32 loss and logits (of
transformers' own eager attention and experts), grad.PARAMETER (tied ones once, by the first name),
and for dropout mask.MODULE.CALL: which elements were kept. Labels of transformers' models stand
where the ids stand, and are moved inside; labels of models.py stand where the logits stand. Two
archives are for the reader alone: storages, whose safetensors holds every tensor by its name, and
meta, which was exported without values.
"""

import gzip
import io
import json
import os
import re
import sys
import tempfile
import zipfile
import zlib

import torch
from torch.export import Dim

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "..", "python")]

import models  # noqa: E402

torch.set_num_threads(1)
BATCH, SEQ = 2, 6

small = dict(vocab_size=40, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None,
             initializer_range=0.2, use_cache=False)
moe = small | dict(num_experts_per_tok=2, intermediate_size=12, moe_intermediate_size=12)
quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

FAMILIES = {
    "llama": ("llama", small),
    "qwen3": ("qwen3", small | dict(head_dim=8, tie_word_embeddings=True)),
    "mistral": ("mistral", small | dict(sliding_window=4)),
    "gemma2": ("gemma2", small | dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=12,
                                      attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "phi3": ("phi3", small | dict(sliding_window=None, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "gpt2": ("gpt2", dict(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0.0,
                          resid_pdrop=0.0, embd_pdrop=0.0, initializer_range=0.2, use_cache=False, bos_token_id=1,
                          eos_token_id=2)),
    "gptneox": ("gpt_neox", {k: v for k, v in small.items() if k != "num_key_value_heads"} | dict(
        intermediate_size=64, attention_dropout=0.0, hidden_dropout=0.0)),
    "olmo2": ("olmo2", small),
    "mixtral": ("mixtral", moe | dict(num_local_experts=4)),
    "qwen3_moe": ("qwen3_moe", moe | dict(num_experts=4, head_dim=8, norm_topk_prob=True)),
    "deepseek_v3": ("deepseek_v3", moe | dict(
        num_hidden_layers=3, num_key_value_heads=4, n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=1,
        num_experts_per_tok=3, moe_intermediate_size=8, intermediate_size=24, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=5)),
    "gpt_oss": ("gpt_oss", moe | dict(num_local_experts=4, head_dim=8, sliding_window=4, swiglu_limit=0.75)),
    "bert": ("bert", {k: v for k, v in small.items() if k != "num_key_value_heads"} | quiet | dict(
        intermediate_size=64, pad_token_id=0)),
    "vit": ("vit", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=12,
                        patch_size=4, num_channels=3, num_labels=5, initializer_range=0.2,
                        problem_type="single_label_classification") | quiet),
}


PLAIN = [n + "_plain" for n in ("llama", "gpt2", "qwen3", "bert", "mistral")]  # as torch.export alone gives them
WITHOUT = ("meta", "deep4", "deep64")  # exported without values
RETRIES = {"qwen3_moe": 1, "deepseek_v3": 1}  # added to seeds, where routing finds fault with earlier ones


def seed(name):
    return zlib.crc32(name.removesuffix("_old").removesuffix("_plain").encode()) + RETRIES.get(name, 0)


def from_transformers(name, impl):
    import transformers
    from deepwell import _export

    transformers.utils.logging.disable_progress_bar()
    _export.register()
    kind, keys = FAMILIES[name.removesuffix("_plain")]
    auto = {"bert": transformers.AutoModelForMaskedLM, "vit": transformers.AutoModelForImageClassification}.get(
        name.removesuffix("_plain"), transformers.AutoModelForCausalLM)
    config = transformers.AutoConfig.for_model(kind, **keys)
    if name in PLAIN:
        return auto.from_config(config)
    config._experts_implementation = impl
    return auto.from_config(config, attn_implementation=impl)


def build(name, impl="deepwell"):
    torch.manual_seed(seed(name))
    stem = name.removesuffix("_old")
    if stem == "storages":
        return models.Storages().train()
    if stem in WITHOUT:
        with torch.device("meta"):
            return {"meta": models.MODELS["tied"], **models.PROGRAMS}[stem]().train()
    if stem in models.PROGRAMS:
        model = models.PROGRAMS[stem]()
        with torch.no_grad():
            for t in model.parameters():
                t.copy_((t * 0.2 if t.dim() > 1 else t).bfloat16().float())
        return model.train()
    model = models.MODELS[stem]() if stem in models.MODELS else from_transformers(stem, impl)
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for k, t in list(model.named_parameters()) + list(model.named_buffers()):
            if k.endswith("correction_bias"):
                t.copy_(torch.randn_like(t) * 0.1)
            elif not isinstance(t, torch.nn.Parameter):
                continue
            elif t.dim() == 1 or k.endswith("_bias"):
                t.add_(torch.randn_like(t) * 0.2)
            t.copy_(t.bfloat16().float())
    return model.train()


def inputs(name):
    torch.manual_seed(1 + seed(name))
    batch, seq = Dim("batch", min=2, max=64), Dim("seq", min=2, max=models.CONTEXTS.get(name, models.CONTEXT) - 1)
    if name.startswith("storages"):
        return dict(x=torch.randn(BATCH, 6)), dict(x={0: batch})
    if name == "vit":
        return (dict(pixel_values=torch.randn(BATCH, 3, 12, 12), labels=torch.randint(0, 5, (BATCH,))),
                dict(pixel_values={0: batch}, labels={0: batch}))
    labels = torch.randint(0, models.VOCAB, (BATCH, SEQ))
    labels[1, 3:5] = -100
    feed = dict(input_ids=torch.randint(1, models.VOCAB, (BATCH, SEQ)), labels=labels)
    return feed, {k: {0: batch, 1: seq} for k in feed}


FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+), in (.*)$')


def clean(trace):
    """Leaves the frames of a stack trace, with paths below site-packages or base names."""
    lines = []
    for line in trace.split("\n"):
        if m := FRAME.match(line):
            if m[1].startswith("<"):
                continue  # code that torch made, numbered as it came
            path = m[1].split("site-packages/")[-1]
            if os.path.isabs(path):
                path = os.path.basename(path)
            lines.append(f'  File "{path}", line {m[2]}, in {m[3]}')
    return "\n".join(lines).strip()


def strip(value):
    if isinstance(value, dict):
        return {k: clean(v) if k == "stack_trace" else strip(v) for k, v in value.items()}
    return [strip(v) for v in value] if isinstance(value, list) else value


def pack(program, stem):
    """The bytes of an archive without machine paths."""
    with tempfile.TemporaryDirectory() as d:
        first, second = os.path.join(d, stem + ".pt2"), os.path.join(d, "out", stem + ".pt2")
        torch.export.save(program, first)
        os.mkdir(os.path.dirname(second))
        writer = torch._C.PyTorchFileWriter(second)
        with zipfile.ZipFile(first) as z:
            for entry in z.namelist():
                data, name = z.read(entry), entry.split("/", 1)[1]
                if name.startswith(".data/") or name == "byteorder":
                    continue  # the writer's own
                if name == "models/model.json":
                    data = json.dumps(strip(json.loads(data))).encode()
                writer.write_record(name, data, len(data))
        if "byteorder" not in writer.get_all_written_records():
            writer.write_record("byteorder", sys.byteorder, len(sys.byteorder))
        writer.write_end_of_file()
        with open(second, "rb") as f:
            data = f.read()
    for secret in (HERE, os.path.expanduser("~"), "site-packages", tempfile.gettempdir()):
        if secret.encode() in data:
            sys.exit(f"{stem}: the archive holds {secret}")
    return data


def export(name):
    feed, dims = inputs(name)
    model = build(name)
    if name in PLAIN:
        return pack(torch.export.export(model, (), feed, dynamic_shapes=dims, strict=False), name)
    extra = dict(use_cache=False) if name in FAMILIES and name not in ("bert", "vit") else {}
    if name in WITHOUT:
        feed = {k: v.to("meta") for k, v in feed.items()}
    program = torch.export.export(model, (), feed | extra, dynamic_shapes=dims | {k: None for k in extra}, strict=False)
    return pack(program, name)


def compute(name):
    """What eager PyTorch computes; with the operators of _export.py it must be the same."""
    if name in WITHOUT or name in models.PROGRAMS:
        return {}
    if name == "storages":
        model = build(name)
        every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(), ("constant", model.constant)]
        return {k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in every}
    if fault := routing(name):
        sys.exit(f"{name}: {fault}; add to RETRIES")
    want = run(name, "eager")
    if name in FAMILIES:
        worst = difference(want, run(name, "deepwell"))
        if worst > 1e-5:
            sys.exit(f"{name}: with our operators {worst:.1e} from transformers' own")
    return want


def routing(name):
    """What is wrong with the choice of experts: scores that rounding could swap, an expert without tokens."""
    feed, _ = inputs(name)
    model = build(name, "eager")
    faults = []

    def judge(module, _, out):
        scores = out[0] if not hasattr(module, "e_score_correction_bias") else (
            out[0].sigmoid() + module.e_score_correction_bias)
        gap = scores.sort().values.diff().min()
        if groups := getattr(model.config, "n_group", None):
            best = scores.unflatten(-1, (groups, -1)).topk(2).values.sum(-1)
            gap = min(gap, best.sort().values.diff().min())
        if gap < 1e-3:
            faults.append(f"scores of experts are {gap:.1e} apart")
        if len(out[2].unique()) < scores.shape[-1]:
            faults.append("an expert has no tokens")

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    for m in routers:
        m.register_forward_hook(judge)
    if routers:
        model(**feed)
    return faults[0] if faults else None


def difference(want, have):
    return max(((v.double() - have[k].double()).norm() / v.double().norm().clamp(min=1e-6)).item()
               for k, v in want.items() if v.numel() > 0)


def run(name, impl):
    feed, _ = inputs(name)
    model = build(name, impl)
    kept, calls = {}, {}

    def hook(path):
        def keep(module, args, out):
            n = calls[path] = calls.get(path, -1) + 1
            kept[f"mask.{path}.{n}"] = (out != 0) | (args[0] == 0)
        return keep

    if name == "dropout":
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout):
                module.register_forward_hook(hook(path))
        torch.manual_seed(3)
    out = model(**feed)
    loss, logits = out["loss"], out["logits"]
    loss.backward()
    want = feed | {"loss": loss.detach().reshape(1), "logits": logits.detach()} | kept
    for k, p in model.named_parameters():
        want["grad." + k] = torch.zeros_like(p) if p.grad is None else p.grad
    return {k: v.contiguous() for k, v in want.items()}


def losses(name):
    """The losses of 50 steps of AdamW on the same batch. Vectors, and what is called bias, do not decay."""
    feed, _ = inputs(name)
    model = build(name, "eager")
    groups = {True: [], False: []}
    for k, p in model.named_parameters():
        groups[p.dim() > 1 and k.split(".")[-1] != "bias"].append(p)
    opt = torch.optim.AdamW([dict(params=groups[True], weight_decay=0.1), dict(params=groups[False], weight_decay=0.0)],
                            lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    list = []
    for _ in range(50):
        opt.zero_grad()
        if name == "dropout":
            torch.manual_seed(3)  # the masks that NAME.safetensors has
        loss = model(**feed)["loss"]
        loss.backward()
        opt.step()
        list.append(float(f"{loss.item():.7g}"))
    return list


LOSSES = os.path.join(HERE, "losses.json")
TRAINED = [n for n in [*FAMILIES, *models.MODELS] if n != "autocast"]  # which is compared by its outputs


def write_losses(names):
    every = json.load(open(LOSSES)) if os.path.exists(LOSSES) else {}
    every |= {n: losses(n) for n in names if n in TRAINED}
    with open(LOSSES, "w") as f:
        f.write("{\n" + ",\n".join(f'"{n}": {json.dumps(every[n])}' for n in sorted(every)) + "\n}\n")


def compare_losses():
    every = json.load(open(LOSSES))
    if sorted(every) != sorted(TRAINED):
        sys.exit(f"losses of other models than are trained: {every.keys() ^ set(TRAINED)}")
    worst = max(abs(a - b) / b for n in TRAINED for a, b in zip(losses(n), every[n]))
    if not worst < 1e-4:
        sys.exit(f"losses are {worst:.1e} from what is computed now")
    return worst


def path(name, ext):
    return os.path.join(HERE, f"{name}.{ext}.gz")


def write(name, ext, data):
    with open(path(name, ext), "wb") as f:
        f.write(gzip.compress(data, 9, mtime=0))


def read(name, ext):
    with gzip.open(path(name, ext)) as f:
        return f.read()


def members(data):
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        return {n.split("/", 1)[1]: z.read(n) for n in z.namelist()}


def compare(name):
    """Checks an archive member by member, but for the sample inputs, which are a pickle."""
    from safetensors.torch import load

    have, made = members(read(name, "pt2")), members(export(name))
    for k in sorted(have.keys() | made.keys()):
        if have.get(k) != made.get(k) and not k.endswith(("model.pt", "serialization_id")):
            sys.exit(f"{name}: {k} is not what is made now")
    if name in models.PROGRAMS or name in PLAIN:
        return 0.0
    want, now = load(read(name, "safetensors")), compute(name)
    if want.keys() != now.keys():
        sys.exit(f"{name}: other tensors than are made now: {want.keys() ^ now.keys()}")
    worst = difference(want, now) if want else 0.0
    if not worst < 1e-4:
        sys.exit(f"{name}: {worst:.1e} from what is computed now")
    return worst


def main():
    every = [*FAMILIES, *PLAIN, *models.MODELS, *models.PROGRAMS, "storages", "meta"]
    if "--old" in sys.argv:
        folder = sys.argv[sys.argv.index("--old") + 1]
        for name in ("tied_old", "einsum_old"):
            with open(os.path.join(folder, name + ".pt2.gz"), "wb") as f:
                f.write(gzip.compress(export(name), 9, mtime=0))
        return
    if "--check" in sys.argv:
        print("largest relative difference", max(compare(name) for name in every))
        print("of losses of 50 steps", compare_losses())
        return
    from safetensors.torch import save

    if "--losses" in sys.argv:
        return write_losses([a for a in sys.argv[1:] if not a.startswith("-")] or TRAINED)
    for name in [a for a in sys.argv[1:] if not a.startswith("-")] or every:
        data = export(name)
        write(name, "pt2", data)
        if name not in models.PROGRAMS and name not in PLAIN:
            write(name, "safetensors", save(compute(name)))
        print(name, len(data), os.path.getsize(path(name, "pt2")))


if __name__ == "__main__":
    main()
