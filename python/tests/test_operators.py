"""The operators of capture in the engine, against eager PyTorch: the cases of capture/aten in f32 and
in bf16. It needs torch; CI runs this file with unittest in the environment that has it."""

from __future__ import annotations

import importlib.util
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

# Numbers of bf16 have 8 bits. Among these, one step decides what comes out, or eager PyTorch computes
# in bf16 what the engine computes in f32.
ROUGH = {"remainder", "fmod", "floor_div", "trunc_div", "frac", "tan", "cumprod", "pow", "base", "poisson", "prod"}


def weights(t: torch.Tensor) -> torch.Tensor:
    return ((torch.arange(t.numel()) % 7 - 3) / 4).view(t.shape).to(t.dtype)


class Operators(unittest.TestCase):
    def compare(self, dtype: torch.dtype, bound: float, names: set[str] | None = None) -> None:
        eager, model = cases.Cases(dtype, names), cases.Cases(dtype, names)
        results: list[Any] = []
        for m in eager, dw.optimize(model):
            results.append(m(*eager.inputs()))
            sum((t * weights(t)).sum() for r in results[-1] for t in r if t.requires_grad).backward()
        for (name, *_), want, have in zip(eager.cases, *results):
            for w, h in zip(want, have):
                self.agree(name, h, w, bound)
        for (path, p), q in zip(eager.named_parameters(), model.parameters()):
            name = eager.cases[int(path[1:path.index("_")])][0]
            have = torch.zeros_like(q) if q.grad is None else q.grad
            self.agree(f"the gradient of {name}", have, torch.zeros_like(p) if p.grad is None else p.grad, bound * 10)

    def agree(self, name: str, have: torch.Tensor, want: torch.Tensor, bound: float) -> None:
        with self.subTest(name):
            self.assertEqual(have.dtype, want.dtype)
            h, w = have.detach().double(), want.detach().double()
            same = (h == w) | h.isnan() & w.isnan() | ((h - w).abs() <= bound * (1 + w.abs()))
            self.assertTrue(bool(same.all()), f"{h.flatten().tolist()}\nnot {w.flatten().tolist()}")

    def test_f32(self) -> None:
        self.compare(torch.float32, 1e-5)

    def test_bf16(self) -> None:
        names = {c[0] for c in cases.CASES if c[0].split()[0] not in ROUGH}
        self.compare(torch.bfloat16, 0.04, names)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    unittest.main()
