#!/usr/bin/env python3
"""Writes the fixtures of package safetensors with the reference library.

Needs: pip install safetensors==0.8.0 numpy

  make.py                 write the fixtures beside this file
  make.py --check         write them elsewhere and compare
  make.py --hostile DIR   DIR was written by `go test -run TestHostile -dump DIR`:
                          the reference must refuse every *.refused and take every *.taken
"""

import hashlib
import json
import pathlib
import sys
import tempfile

import numpy as np
from safetensors import TensorSpec, deserialize, safe_open, serialize_file

HERE = pathlib.Path(__file__).resolve().parent

# Every type that the reference can write, with the bits of an element.
TYPES = {
    "bool": 8, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32,
    "int64": 64, "uint64": 64, "float16": 16, "float32": 32, "float64": 64, "bfloat16": 16,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e8m0fnu": 8, "float4_e2m1fn_x2": 8,
    "complex64": 64,
}


def pattern(seed, n):
    """n bytes that repeat nowhere near each other."""
    return np.array([(seed * 131 + i * 7 + i // 256) % 256 for i in range(n)], dtype=np.uint8)


def write(path, tensors, metadata=None):
    """tensors: name -> (dtype, shape, bytes)."""
    specs = {
        name: TensorSpec(dtype=dtype, shape=shape, data_ptr=data.ctypes.data, data_len=data.nbytes)
        for name, (dtype, shape, data) in tensors.items()
    }
    serialize_file(specs, str(path), metadata=metadata)


def raw(dtype, shape, seed):
    n = int(np.prod(shape, dtype=np.int64)) * TYPES.get(dtype, 8) // 8
    data = pattern(seed, n)
    if dtype == "bool":
        data = data % 2
    return dtype, shape, data


def fixtures(out):
    # float4_e2m1fn_x2 counts bytes here; the header doubles the last dimension.
    write(out / "types.safetensors", {
        f"t.{name}": raw(name, [2, 3], i) for i, name in enumerate(TYPES)
    }, {"format": "np"})
    write(out / "shapes.safetensors", {
        "scalar": raw("float32", [], 1),
        "none": raw("int16", [0], 2),
        "none.rows": raw("float64", [3, 0, 2], 3),
        "odd": raw("uint8", [3], 4),
        "ones": raw("int64", [1, 1, 1, 1], 5),
        "box": raw("float32", [4, 5, 6], 6),
        "matrix": raw("bfloat16", [16, 24], 7),
    })
    write(out / "names.safetensors", {
        "b": raw("uint8", [1], 1),
        "a": raw("uint8", [2], 2),
        "A": raw("uint8", [3], 3),
        "a.10": raw("uint8", [4], 4),
        "a.2": raw("uint8", [5], 5),
        "größe": raw("uint8", [6], 6),
        'quo"te\\': raw("uint8", [7], 7),
        "../x": raw("uint8", [8], 8),
        "\U0001f9ca\u2028": raw("uint8", [9], 9),
    }, {"note": "line\nfeed \x01 \t \u007f é"})
    write(out / "nothing.safetensors", {})
    write(out / "foreign.safetensors", {"w": raw("float8_e4m3fnuz", [4], 1)})

    sharded = out / "sharded"
    sharded.mkdir(exist_ok=True)
    parts = [
        {"embed.weight": raw("float32", [8, 4], 1), "layers.0.weight": raw("float32", [4, 4], 2)},
        {"layers.1.weight": raw("float32", [4, 4], 3), "norm.weight": raw("float32", [4], 4)},
    ]
    weights = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        write(sharded / name, part, {"format": "pt"})
        weights |= dict.fromkeys(part, name)
    total = sum(t[2].nbytes for p in parts for t in p.values())
    # As transformers writes it (modeling_utils.py): two spaces, sorted, a line feed.
    (sharded / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weights},
                   indent=2, sort_keys=True) + "\n")


BOXES = {
    "box": [([0, 0, 0], [4, 5, 6]), ([1, 2, 3], [2, 2, 2]), ([0, 4, 0], [4, 1, 6]),
            ([3, 0, 5], [1, 5, 1]), ([2, 1, 0], [2, 3, 6])],
    "odd": [([1], [2])],
    "ones": [([0, 0, 0, 0], [1, 1, 1, 1])],
}


def expected(out):
    """What the reference reads back: types, shapes, digests, and the bytes of boxes."""
    files = {}
    for path in sorted(out.rglob("*.safetensors")):
        with safe_open(str(path), framework="np") as f:
            metadata = f.metadata()
        tensors = {
            name: {"dtype": t["dtype"], "shape": t["shape"],
                   "sha256": hashlib.sha256(t["data"]).hexdigest()}
            for name, t in deserialize(path.read_bytes())
        }
        files[path.relative_to(out).as_posix()] = {"metadata": metadata, "tensors": tensors}
    boxes = []
    with safe_open(str(out / "shapes.safetensors"), framework="np") as f:
        for name, cases in BOXES.items():
            for start, size in cases:
                part = f.get_slice(name)[tuple(slice(a, a + n) for a, n in zip(start, size))]
                boxes.append({"tensor": name, "start": start, "size": size,
                              "hex": part.tobytes().hex()})
    (out / "expected.json").write_text(
        json.dumps({"files": files, "boxes": boxes}, sort_keys=True, separators=(",", ":")) + "\n")


def make(out):
    fixtures(out)
    expected(out)


def check():
    with tempfile.TemporaryDirectory() as tmp:
        out = pathlib.Path(tmp)
        make(out)
        bad = [p.relative_to(out) for p in sorted(out.rglob("*"))
               if p.is_file() and (HERE / p.relative_to(out)).read_bytes() != p.read_bytes()]
    for p in bad:
        print(f"{p} differs from what the reference library writes")
    return not bad


def hostile(folder):
    bad, seen = 0, 0
    for path in sorted(pathlib.Path(folder).iterdir()):
        try:
            deserialize(path.read_bytes())
            verdict = ".taken"
        except Exception:
            verdict = ".refused"
        seen += 1
        if path.suffix != verdict:
            bad += 1
            print(f"{path.name}: the reference says {verdict[1:]}")
    print(f"{seen} inputs, {bad} verdicts differ")
    return seen > 0 and bad == 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            make(HERE)
        case ["--check"]:
            sys.exit(0 if check() else 1)
        case ["--hostile", folder]:
            sys.exit(0 if hostile(folder) else 1)
        case _:
            sys.exit(__doc__)
