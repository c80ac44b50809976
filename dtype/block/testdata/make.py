#!/usr/bin/env python3
"""Writes the fixture of package block with torchao, JAX and numpy.

Needs: pip install torch==2.15.0 torchao==0.18.0 jax==0.10.2 numpy

  make.py                    write blocks.json beside this file
  make.py --check            compute it again and compare
  make.py --reference FILE   also compare NVFP4 with torchao's own reference, the file
                             test/prototype/moe_training/nvfp4_training/nvfp4_reference.py
                             of its repository, which is not in the package

MXFP8 is what torchao's to_mx (RCEIL) and JAX's quantize both give. NVFP4 follows the facts of
TransformerEngine's recipe, with torchao's FP4 rounding, packing, Hadamard matrix and swizzle.
Sources are made from whole numbers alone, so Go makes the same ones; see source below.
"""

import hashlib
import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax._src.cudnn import scaled_matmul_stablehlo as jax_mm
from torchao.prototype.moe_training.nvfp4_training import hadamard_utils
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.utils import to_blocked

HERE = pathlib.Path(__file__).resolve().parent
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
FLT_MAX = float(np.finfo(np.float32).max)


def mix(h):
    h = np.asarray(h, dtype=np.uint32)
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def source(seed, n, spread, bf16):
    """n float32: random sign and fraction, and exponents that spread over this many binades."""
    i = np.arange(n, dtype=np.uint32)
    a = mix(i ^ mix(np.uint32(seed)))
    b = mix(a ^ np.uint32(0x9E3779B9))
    # The smaller of two picks: large numbers are rarer than small ones, as in a normal sample.
    pick = np.minimum((b >> 8) % np.uint32(spread), (b >> 20) % np.uint32(spread))
    bits = (a & np.uint32(0x807FFFFF)) | ((np.uint32(127 - spread // 2) + pick) << 23)
    if bf16:
        bits &= np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def sha(*arrays):
    h = hashlib.sha256()
    for a in arrays:
        h.update(np.ascontiguousarray(a).view(np.uint8).tobytes())
    return h.hexdigest()


def same(what, a, b):
    if not np.array_equal(a, b):
        sys.exit(f"{what}: {np.count_nonzero(a != b)} of {a.size} bytes differ")


def mxfp8(x, bf16):
    t = torch.from_numpy(x.copy())
    if bf16:
        t = t.bfloat16()
    scales, q = to_mx(t, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    q, scales = q.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy()
    config = jax_mm.BlockScaleConfig("mxfp8", 32, jnp.float8_e4m3fn, jnp.float8_e8m0fnu, None, False)
    a = jnp.asarray(x)[None]
    jq, js = jax_mm.quantize(a.astype(jnp.bfloat16) if bf16 else a, config)
    same("elements of torchao and JAX", q, np.asarray(jq[0]).view(np.uint8))
    same("scales of torchao and JAX", scales, np.asarray(js[0]).view(np.uint8))
    return q, scales


def grid(amax):
    enc = np.float32(min(np.float32(2688) / np.float32(amax), FLT_MAX)) if amax else np.float32(1)
    return torch.tensor(enc * np.float32(1 / 6)), torch.tensor(np.float32(1) / enc)


def nvfp4(x, tile, amax):
    """x as blocks of tile×16."""
    rows, cols = x.shape
    sixth, out = grid(amax)
    t = torch.from_numpy(x.copy())
    most = t.abs().reshape(rows // tile, tile, cols // 16, 16).amax(dim=(1, 3))
    scales = (most * sixth).clamp(max=448).to(torch.float8_e4m3fn)
    factor = (1 / (scales.float() * out)).clamp(max=FLT_MAX)
    wide = factor.repeat_interleave(tile, 0).repeat_interleave(16, 1)
    q = pack_uint4(f32_to_f4_unpacked((t * wide).clamp(-6, 6).contiguous()))
    return q.numpy(), scales.repeat_interleave(tile, 0).view(torch.uint8).numpy(), wide.numpy()


def stochastic(x, amax, key, row, col):
    """The same scales; elements by chance."""
    _, scales, wide = nvfp4(x, 1, amax)
    v = np.clip(x * wide, np.float32(-6), np.float32(6))
    a = np.abs(v)
    rows = (np.arange(x.shape[0], dtype=np.uint32) + np.uint32(row))[:, None]
    cols = (np.arange(x.shape[1], dtype=np.uint32) + np.uint32(col))[None]
    four = mix(mix(rows ^ key[0]) ^ cols[:, ::4] ^ key[1]).repeat(4, 1)
    shift = np.tile(np.array([0, 16, 8, 24], np.uint32), x.shape[1] // 4)[None]
    u = (four >> shift & np.uint32(255)) / 256.0
    step = np.where(a < 2, np.float32(0.5), np.where(a < 4, np.float32(1), np.float32(2)))
    got = np.minimum(np.floor((a / step).astype(np.float64) + u) * step, 6)
    code = np.searchsorted(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), got).astype(np.uint8)
    code |= np.where(np.signbit(v), 8, 0).astype(np.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, scales


def key(seed, step, tensor):
    a = mix(np.uint32(seed) ^ mix(np.uint32(step) ^ mix(np.uint32(tensor))))
    return a, mix(a ^ np.uint32(0x85EBCA6B))


def hadamard(x):
    """Rows of 16 times the signed matrix, in bfloat16 with float32 sums."""
    h = hadamard_utils.get_rht_matrix(SIGNS, torch.device("cpu"), torch.bfloat16, 16)
    t = torch.from_numpy(x.copy()).bfloat16().reshape(-1, 16)
    return (t @ h).float().numpy().reshape(x.shape)


def reference(path):
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module
    # The package of this version has neither name; neither matters to what is compared.
    hadamard_utils.DEFAULT_SIGN_VECTOR = SIGNS
    import torchao.prototype.mx_formats.utils as utils
    if not hasattr(utils, "to_blocked_grouped"):
        utils.to_blocked_grouped = None
    spec.loader.exec_module(module)
    return module


def case(out, ref, seed, rows, cols, spread, bf16):
    x = source(seed, rows * cols, spread, bf16).reshape(rows, cols)
    entry = {"seed": seed, "rows": rows, "cols": cols, "spread": spread, "bf16": bf16,
             "source": sha(x)}
    q, scales = mxfp8(x, bf16)
    entry["mxfp8"] = sha(q, scales)
    amax = float(np.abs(x).max())
    for name, tile in (("nvfp4", 1), ("tiles", 16)):
        q, scales, _ = nvfp4(x, tile, amax)
        entry[name] = sha(q, scales)
        if ref:
            got = ref.nvfp4_reference_quantize(
                torch.from_numpy(x.copy()), torch.tensor(amax), block=f"{tile}x16")
            same(name + " of the reference", q, got.codes.numpy())
            same(name + " scales", scales, got.scales.view(torch.uint8).numpy())
    k = key(seed, 7, 3)
    q, scales = stochastic(x, amax, k, 5, 32)
    entry["stochastic"] = sha(q, scales)
    if bf16 and spread <= 8:  # sums are exact, whatever their order
        turned = hadamard(np.ascontiguousarray(x.T))
        most = float(np.abs(turned).max())
        q, scales, _ = nvfp4(turned, 1, most)
        entry["hadamard"] = sha(turned, q, scales)
        if ref:
            a = torch.from_numpy(x.copy()).bfloat16()
            col, _ = ref.reference_rht_quantize_row_col(
                a, torch.tensor(most), torch.tensor(amax), layout="plain")
            same("hadamard of the reference", q, col.codes.numpy())
            same("hadamard scales", scales, col.scales.view(torch.uint8).numpy())
    out.append(entry)


def make(ref):
    cases = []
    for seed, (rows, cols) in enumerate([(64, 256), (256, 64), (32, 2048), (512, 512)], 1):
        for spread in (6, 8, 20):
            for bf16 in (False, True):
                case(cases, ref, seed, rows, cols, spread, bf16)
    swizzle = []
    for rows, cols in [(128, 4), (1, 1), (200, 6), (300, 13), (256, 12)]:
        b = (mix(np.arange(rows * cols, dtype=np.uint32)) & 0xFF).astype(np.uint8)
        t = to_blocked(torch.from_numpy(b.reshape(rows, cols)))
        swizzle.append({"rows": rows, "cols": cols, "tiled": sha(t.numpy())})
    # One block of each in full, for a person.
    x = source(1, 32, 6, True).reshape(1, 32)
    q8, s8 = mxfp8(x, True)
    q4, s4, _ = nvfp4(x, 1, float(np.abs(x).max()))
    shown = {"source": (x.view(np.uint32) >> 16).astype(">u2").tobytes().hex(),
             "mxfp8": q8.tobytes().hex(), "mxfp8_scales": s8.tobytes().hex(),
             "nvfp4": q4.tobytes().hex(), "nvfp4_scales": s4.tobytes().hex()}
    return json.dumps({"shown": shown, "cases": cases, "swizzle": swizzle}, indent=1) + "\n"


def main():
    jax.config.update("jax_platforms", "cpu")
    np.seterr(over="ignore")
    ref = None
    if "--reference" in sys.argv:
        ref = reference(sys.argv[sys.argv.index("--reference") + 1])
    text, path = make(ref), HERE / "blocks.json"
    if "--check" in sys.argv:
        if path.read_text() != text:
            sys.exit("blocks.json differs")
        print("blocks.json: the same")
        return
    path.write_text(text)
    print("blocks.json written")


main()
