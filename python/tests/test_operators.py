"""The operators of capture in the engine, against eager PyTorch: the cases of capture/aten in f32, in
bf16, and some in f64. It needs torch; CI runs this file with unittest in the environment that has it."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import unittest
import warnings
from typing import Any

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("there is no torch")

import torch

import deepwell as dw

sys.path.append(str(pathlib.Path(__file__).parents[2] / "capture/aten/testdata"))

import cases  # type: ignore[import-not-found]

# Eager PyTorch rounds to bf16 between the steps of these, and ends farther from the numbers than the bound; one such
# step moves a quotient over a whole number. They are held against eager PyTorch in f64, of the same numbers of bf16.
STEPS = {"trunc_div x row", "instance_norm", "std 0 x", "fmod x row"}

# A number of bf16 has 8 bits: the engine and eager PyTorch may round to neighbours, 2^-7 apart, and gradients are
# rounded once more.
BF16 = 0.01


# f32 alone takes a minute and a half; .ci/full sets this for the other types.
ALL = os.environ.get("DEEPWELL_TYPES") == "all"


def weights(t: torch.Tensor) -> torch.Tensor:
    return ((torch.arange(t.numel()) % 7 - 3) / 4).view(t.shape).to(t.dtype)


class Operators(unittest.TestCase):
    def compare(self, dtype: torch.dtype, bound: float, slopes: float, names: set[str] | None = None) -> None:
        eager, model = cases.Cases(dtype, names), cases.Cases(dtype, names)
        runs: list[tuple[Any, Any]] = [(eager, eager), (dw.optimize(model), model)]
        steps = {c[0] for c in eager.cases} & STEPS if dtype == torch.bfloat16 else set()
        if steps:
            exact = cases.Cases(torch.float64)
            with torch.no_grad():
                for p, q in zip(exact.parameters(), eager.parameters()):
                    p.copy_(q)
            runs.append((exact, exact))
        results: list[Any] = []
        for run, m in runs:
            results.append(run(*(t.to(m.fixed[x].dtype) for x, t in zip(eager.letters, eager.inputs()))))
            sum((t * weights(t)).sum() for r in results[-1] for t in r if t.requires_grad).backward()
        for k, (name, *_) in enumerate(eager.cases):
            for w, h in zip(results[2 if name in steps else 0][k], results[1][k]):
                self.agree(name, h, w.to(dtype) if name in steps else w, bound)
        parameters = [dict(m.named_parameters()) for _, m in runs]
        for path, q in parameters[1].items():
            name = eager.cases[int(path[1:path.index("_")])][0]
            p = parameters[2 if name in steps else 0][path]
            have = torch.zeros_like(q) if q.grad is None else q.grad
            want = torch.zeros_like(p) if p.grad is None else p.grad
            self.agree(f"the gradient of {name}", have, want.to(dtype), slopes)

    def agree(self, name: str, have: torch.Tensor, want: torch.Tensor, bound: float) -> None:
        with self.subTest(name):
            self.assertEqual(have.dtype, want.dtype)
            h, w = have.detach().double(), want.detach().double()
            same = (h == w) | h.isnan() & w.isnan() | ((h - w).abs() <= bound * (1 + w.abs()))
            self.assertTrue(bool(same.all()), f"{h.flatten().tolist()}\nnot {w.flatten().tolist()}")

    def test_f32(self) -> None:
        self.compare(torch.float32, 1e-5, 1e-4)

    @unittest.skipUnless(ALL, "DEEPWELL_TYPES is not all")
    def test_bf16(self) -> None:
        self.compare(torch.bfloat16, BF16, 2 * BF16)

    @unittest.skipUnless(ALL, "DEEPWELL_TYPES is not all")
    def test_f64(self) -> None:
        """Functions that the graph composes have the digits of f64."""
        self.compare(torch.float64, 1e-13, 1e-12, {f"{n} {x}" for n in (
            "erf", "gelu", "gelu tanh", "log1p", "expm1", "sinh", "asinh", "atanh", "softplus", "logsigmoid", "mish", "elu",
            "logaddexp") for x in ("k", "x", "unit", "plus", "x y")})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    unittest.main()
