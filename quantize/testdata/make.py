"""Makes the fixtures of package narrow, and holds what it writes to the packages that read it. Run it
with torch 2.15.0, transformers 5.22.2 and compressed-tensors 0.20.0, and go on the path:

    python make.py            # writes llama/, gptoss/ and expected.json beside this file
    python make.py --check    # computes again and compares with what is there

llama/ is a tiny random Llama in bf16, with blocks of zeros, blocks that vanish beside others,
and corners of the scales. gptoss/ is experts in MXFP4 and what stands around them.
deepwell quantizes both, for both families of loaders.

What is for compressed-tensors is decompressed by that package, and loaded by transformers: the
logits must be finite and near those of the bf16 model. What is for modelopt is brought into the
other form by compressed-tensors' own converter. The configuration must say what the presets of the
package say. Exports of a model in f32, and what is quantized of them, must load by their folder alone,
generate, and know their chat template. expected.json has the SHA-256 of every file of weights and of the numbers that each
weight decompresses to, in bf16; the Go tests compare with it, so both read the same numbers.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile

os.environ["TQDM_DISABLE"] = "1"

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

logging.disable_progress_bar()
torch.set_num_threads(1)

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

# How far logits may be from those of the bf16 model, relative and by Frobenius norm: a quarter above
# what is seen. A random model has nothing to fall back on, so the error of its weights, 2.7 % in MXFP8
# (31 dB) and 9.5 % in NVFP4 (20 dB), passes through both layers undiminished; in the first and the
# third the package rounds activations as well.
NEAR = {"mxfp8": 0.11, "nvfp4": 0.30, "nvfp4-a": 0.43, "mixed": 0.30}

JOBS = {  # name: (model, arguments, preset)
    "mxfp8": ("llama", ["--to", "mxfp8"], "MXFP8"),
    "nvfp4": ("llama", ["--to", "nvfp4"], "NVFP4A16"),
    "nvfp4-a": ("llama", ["--to", "nvfp4", "--input-amax", "16"], "NVFP4"),
    "mixed": ("llama", ["--to", "nvfp4", "--policy", os.path.join(HERE, "policy.json")], "MXFP8"),
    "mxfp8-modelopt": ("llama", ["--to", "mxfp8", "--layout", "modelopt"], "MXFP8"),
    "nvfp4-modelopt": ("llama", ["--to", "nvfp4", "--layout", "modelopt"], "W4A16_NVFP4"),
    "nvfp4-a-modelopt": ("llama", ["--to", "nvfp4", "--layout", "modelopt", "--input-amax", "16"], "NVFP4"),
    "gptoss": ("gptoss", ["--to", "nvfp4"], "NVFP4A16"),
    "gptoss-modelopt": ("gptoss", ["--to", "nvfp4", "--layout", "modelopt"], "W4A16_NVFP4"),
}


def llama(folder):
    torch.manual_seed(7)
    config = LlamaConfig(vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.08,
                         max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        w = model.model.layers[0].self_attn.q_proj.weight
        w[0, :32] = 0                   # a block of zeros, in both sizes
        w[1, :32] = -0.0
        w[2, 0], w[2, 1:32] = 0.875, 0  # 1.75·2⁻¹, where rules for the scale differ
        w[3, :32] = 2.0 ** -130         # subnormal in bf16
        w = model.model.layers[1].mlp.down_proj.weight
        w[5, :48] = 0
        w[6, :48] *= 2.0 ** -20         # whose scales would be zero beside the others
        model.model.layers[1].self_attn.k_proj.weight.zero_()  # nothing at all, fused with q and v
    model.save_pretrained(folder)
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        f.write("{}\n")
    os.remove(os.path.join(folder, "generation_config.json"))


def gptoss(folder):
    torch.manual_seed(8)
    experts, hidden, inner = 2, 64, 32
    base = "model.layers.0.mlp.experts."
    t = {}
    for name, rows, cols in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        t[base + name + "_blocks"] = torch.randint(0, 256, (experts, rows, cols // 32, 16), dtype=torch.uint8)
        t[base + name + "_scales"] = torch.randint(110, 127, (experts, rows, cols // 32), dtype=torch.uint8)
        t[base + name + "_bias"] = torch.randn(experts, rows).bfloat16()
    t[base + "gate_up_proj_blocks"][0, 3] = 0  # zeros with a scale far below all others
    t[base + "gate_up_proj_scales"][0, 3] = 20
    t["model.layers.0.mlp.router.weight"] = torch.randn(experts, hidden).bfloat16()
    t["model.layers.0.self_attn.o_proj.weight"] = torch.randn(hidden, hidden).bfloat16()
    t["model.embed_tokens.weight"] = torch.randn(47, hidden).bfloat16()
    t["model.norm.weight"] = torch.ones(hidden).bfloat16()
    t["lm_head.weight"] = torch.randn(47, hidden).bfloat16()
    os.makedirs(folder, exist_ok=True)
    save_file(t, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": hidden,
                   "intermediate_size": inner, "num_local_experts": experts, "quantization_config": {
                       "quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}, f, indent=2)


def sha(data):
    return hashlib.sha256(data).hexdigest()


def digest(t):
    return sha(t.contiguous().view(torch.uint8).numpy().tobytes())


def same(a, b, what):
    if a.shape != b.shape or not torch.equal(a, b):
        sys.exit(f"{what} differs by {(a.float() - b.float()).abs().max():.3g}")


def modules(tensors, suffix):
    return sorted(k.removesuffix(suffix) for k in tensors if k.endswith(suffix))


def decompress(folder, layout):
    """The numbers of every quantized weight, by the real package, in bf16."""
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)["quantization_config"]
    if layout == "modelopt":
        return undo_modelopt(tensors, config)
    parsed = QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "version"})
    weights = {}
    for m in modules(tensors, ".weight_scale"):
        [scheme] = [g for g in parsed.config_groups.values() if m in g.targets or g.targets == ["Linear"]]
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        state = {k.removeprefix(m + "."): v for k, v in tensors.items() if k.rpartition(".")[0] == m}
        missing = [p for p in compressor.compression_param_names(scheme) if p not in state]
        if missing:
            sys.exit(f"{folder}: {m} has no {missing}")
        weights[m] = compressor.decompress(state, scheme)["weight"].bfloat16()
    return weights


def undo_modelopt(tensors, config):
    if config["quant_algo"] == "MXFP8":
        return {m: (tensors[m + ".weight"].float() *
                    (2.0 ** (tensors[m + ".weight_scale"].int() - 127).float()).repeat_interleave(32, -1)).bfloat16()
                for m in modules(tensors, ".weight_scale")}
    stacked = modules(tensors, "_proj_weight_scale")
    if stacked:  # experts: columns/2 before rows
        weights = {}
        for m in stacked:
            m += "_proj"
            scale = tensors[m + "_weight_scale"].float() * tensors[m + "_weight_scale_2"]
            weights[m] = e2m1(tensors[m].transpose(-1, -2)) * scale.transpose(-1, -2).repeat_interleave(16, -1)
        return {m: w.bfloat16() for m, w in weights.items()}
    converter = ModelOptNvfp4Converter(targets=["re:.*proj$"], ignore=config["ignore"])
    names = modules(tensors, ".weight_scale_2")
    factor = {m: tensors[m + ".weight_scale_2"].clone() for m in names}
    tensors = converter.validate(tensors)
    weights = {}
    for m in names:
        # The reciprocal of a reciprocal is not what it was, so the factor is the one of the file.
        scale = tensors[m + ".weight_scale"].float() * factor[m]
        weights[m] = (e2m1(tensors[m + ".weight_packed"]) * scale.repeat_interleave(16, -1)).bfloat16()
    return weights


def e2m1(packed):
    table = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6])
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[both.int()]


def check_config(folder, preset, layout):
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)["quantization_config"]
    if layout == "modelopt":
        with open(os.path.join(folder, "hf_quant_config.json")) as f:
            q = json.load(f)["quantization"]
        if config["quant_algo"] != preset or q["quant_algo"] != preset or q["exclude_modules"] != config["ignore"]:
            sys.exit(f"{folder}: {config}, {q}")
        return
    scheme = QuantizationConfig.model_validate(
        {k: v for k, v in config.items() if k != "version"}).config_groups["group_0"]
    want = preset_name_to_scheme(preset, scheme.targets)
    want.format = scheme.format
    if want.input_activations is not None:
        want.input_activations.observer = None  # it is for calibration
    if scheme.model_dump() != want.model_dump():
        sys.exit(f"{folder}: {scheme} is not {want}")


def check_experts(source, weights):
    """MXFP4 to NVFP4 loses nothing: transformers' own reading of the source is the measure."""
    t = load_file(os.path.join(source, "model.safetensors"))
    base = "model.layers.0.mlp.experts."
    for name in ("gate_up_proj", "down_proj"):
        want = convert_moe_packed_tensors(t[base + name + "_blocks"], t[base + name + "_scales"],
                                          dtype=torch.bfloat16).transpose(1, 2)  # experts, rows, columns
        if base + name in weights:
            same(weights[base + name], want, name)
            continue
        for e in range(want.shape[0]):
            if name == "down_proj":
                same(weights[f"{base}{e}.down_proj"], want[e], f"{e}.{name}")
            else:
                same(weights[f"{base}{e}.gate_proj"], want[e, 0::2], f"{e}.gate_proj")
                same(weights[f"{base}{e}.up_proj"], want[e, 1::2], f"{e}.up_proj")


def check_logits(source, folder, job, weights):
    ids = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(3))
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    after, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            sys.exit(f"{folder}: {what} {info[what]}")
    with torch.no_grad():
        want, got = before(input_ids=ids).logits.float(), after.eval()(input_ids=ids).logits.float()
    with torch.no_grad():
        for m, w in weights.items():
            same(after.get_submodule(m).weight, w, m)
            before.get_submodule(m).weight.copy_(w)
        if job == "nvfp4":  # weights alone: a plain model with the same numbers computes the same
            same(got, before(input_ids=ids).logits.float(), "logits")
    far = ((got - want).norm() / want.norm()).item()
    if not torch.isfinite(got).all() or not far < NEAR[job]:
        sys.exit(f"{job}: logits are {far:.3f} from those of bf16")
    return far


def chat(folder):
    """A model in f32 with a tokenizer, a chat template and a generation config, as a person tunes one."""
    llama(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(folder)
    words = ["<unk>", "<s>", "</s>"] + [chr(c) for c in range(97, 123)]
    tokens = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}<s> {{ m.content }} </s> {% endfor %}"
    fast.save_pretrained(folder)


def generates(folder, dtype):
    """What is written loads with no argument but its folder, and speaks; its tokenizer knows how to chat."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    if model.dtype != dtype or info["missing_keys"] or info["unexpected_keys"]:
        sys.exit(f"{folder}: {model.dtype}, {info}")
    tokens = AutoTokenizer.from_pretrained(folder)
    ids = tokens.apply_chat_template([{"role": "user", "content": "a b c"}], return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    if out.shape != (1, ids["input_ids"].shape[1] + 4) or model.generation_config.eos_token_id != [2, 7]:
        sys.exit(f"{folder}: {out}, {model.generation_config}")


def check_generates(binary, d):
    """Exports and quantized exports of a model in f32 and in bf16, as folders that generate."""
    deepwell = lambda *args: subprocess.run([binary, *args], check=True, stdout=subprocess.DEVNULL)
    at = lambda name: os.path.join(d, name)
    chat(at("chat"))
    deepwell("export", at("chat"), "-o", at("plain"))
    generates(at("plain"), torch.float32)
    deepwell("export", at("chat"), "-o", at("half"), "--dtype", "bf16")
    generates(at("half"), torch.bfloat16)
    deepwell("export", at("half"), "-o", at("half-again"))
    generates(at("half-again"), torch.bfloat16)
    deepwell("export", at("chat"), "-o", at("f16"), "--dtype", "f16")
    count = 3
    for to in ("mxfp8", "nvfp4"):
        deepwell("export", at("chat"), "-o", at("export-" + to), "--to", to)
        generates(at("export-" + to), torch.bfloat16)
        for source in ("plain", "half", "f16"):
            deepwell("quantize", at(source), "-o", at(source + "-" + to), "--to", to)
            generates(at(source + "-" + to), torch.bfloat16)
        count += 4
    print(f"{count} exports generate in transformers, with their chat template")


def main(check):
    expected = {}
    with tempfile.TemporaryDirectory() as d:
        binary = os.path.join(d, "deepwell")
        subprocess.run(["go", "build", "-o", binary, "./cmd/deepwell"], cwd=ROOT, check=True)
        for make in (llama, gptoss):
            folder = os.path.join(d if check else HERE, make.__name__)
            make(folder)
            expected[make.__name__] = sha(open(os.path.join(folder, "model.safetensors"), "rb").read())
        for job, (model, args, preset) in JOBS.items():
            source, folder = os.path.join(d if check else HERE, model), os.path.join(d, "out", job)
            run = [binary, "quantize", source, "-o", folder, *args]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
            layout = "modelopt" if "modelopt" in args else "compressed-tensors"
            check_config(folder, preset, layout)
            weights = decompress(folder, layout)
            if model == "gptoss":
                check_experts(source, weights)
            elif layout != "modelopt":
                far = check_logits(source, folder, job, weights)
                print(f"{job}: {len(weights)} weights load; logits are {100 * far:.1f} % from bf16's")
            expected[job] = {
                "file": sha(open(os.path.join(folder, "model.safetensors"), "rb").read()),
                "weights": {m: digest(w) for m, w in sorted(weights.items())}}
        check_generates(binary, d)
    text = json.dumps(expected, indent=1) + "\n"
    path = os.path.join(HERE, "expected.json")
    if not check:
        with open(path, "w") as f:
            f.write(text)
    elif open(path).read() != text:
        sys.exit("expected.json is not what is computed now")
    print(f"{len(JOBS)} quantized checkpoints decompress to the same numbers")


main("--check" in sys.argv)
