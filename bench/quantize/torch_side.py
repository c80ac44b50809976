"""The torchao side of bench/quantize: quantizes the same shape and answers how long it took.

Arguments: ROWS COLS. Reads lines "NAME" and answers with seconds. Names: mxfp8, nvfp4 under
torch.compile, mxfp8-eager and nvfp4-eager without.
"""

import sys
import time

import torch
import torchao
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize


def mxfp8(x):
    return to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)


def nvfp4(x):
    return nvfp4_quantize(x, 16, x.abs().amax().float() / 2688)


rows, cols = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(1)
x = torch.randn(rows, cols).bfloat16()
sides = {
    "mxfp8": torch.compile(mxfp8), "nvfp4": torch.compile(nvfp4),
    "mxfp8-eager": mxfp8, "nvfp4-eager": nvfp4,
}
with torch.no_grad():
    for f in sides.values():
        f(x)
    print("ready torch", torch.__version__, "torchao", torchao.__version__,
          "threads", torch.get_num_threads(), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        sides[line.strip()](x)
        print(time.perf_counter() - begin, flush=True)
