#!/usr/bin/env python3
"""Writes the fixture of package dtype with ml_dtypes: what each narrow type decodes to and encodes.

Needs: pip install ml_dtypes==0.6.0 numpy

  make.py           write small.json beside this file
  make.py --check   compute it again and compare
"""

import hashlib
import json
import pathlib
import sys

import ml_dtypes
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
TYPES = {
    "f8e4m3fn": (ml_dtypes.float8_e4m3fn, 256),
    "f8e5m2": (ml_dtypes.float8_e5m2, 256),
    "f8e8m0fnu": (ml_dtypes.float8_e8m0fnu, 256),
    "f4e2m1fn": (ml_dtypes.float4_e2m1fn, 16),
}


def digest(values, dtype):
    """The codes of values; NaN is left out for the type that has none."""
    if dtype is ml_dtypes.float4_e2m1fn:
        values = values[~np.isnan(values)]
    return hashlib.sha256(values.astype(dtype).view(np.uint8).tobytes()).hexdigest()


def middles(decoded):
    """Halfway between neighbours, and one ulp to either side, of both signs."""
    v = np.unique(decoded[np.isfinite(decoded)].astype(np.float64))
    mid = ((v[1:] + v[:-1]) / 2).astype(np.float32)
    lo = np.nextafter(mid, np.float32(-np.inf))
    hi = np.nextafter(mid, np.float32(np.inf))
    return np.stack([lo, mid, hi], axis=1).reshape(-1)


def make():
    every = np.arange(1 << 16, dtype=np.uint32)
    bf16 = (every << 16).view(np.float32)
    f16 = every.astype(np.uint16).view(np.float16).astype(np.float32)
    out = {}
    for name, (dtype, n) in TYPES.items():
        decoded = np.arange(n, dtype=np.uint8).view(dtype).astype(np.float32)
        bits = [("nan" if np.isnan(f) else f"{f.view(np.uint32):08x}") for f in decoded]
        mid = middles(decoded)
        out[name] = {
            "decode": " ".join(bits),
            "bf16": digest(bf16, dtype),
            "f16": digest(f16, dtype),
            "middles": [int(len(mid)), digest(mid, dtype)],
        }
    return json.dumps(out, indent=1) + "\n"


def main():
    text, path = make(), HERE / "small.json"
    if "--check" not in sys.argv:
        path.write_text(text)
    elif path.read_text() != text:
        sys.exit("small.json differs")
    print("small.json: the same" if "--check" in sys.argv else "narrow.json written")


main()
