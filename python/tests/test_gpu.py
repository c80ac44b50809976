"""optimize with memory of a GPU, as far as it goes without one: torch runs on the CPU, on tensors in
memory of the software GPU, and the engine on that GPU. package call's tests run this file, with the
libraries of the software GPU."""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib.util
import os
import pathlib
import signal
import sys
import unittest
import unittest.mock
from typing import Any

if "SOFTGPU_SHARE" not in os.environ or importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("there is no software GPU, or no torch")

import torch
from torch import nn

import deepwell as dw
from deepwell import _child, _gpu

# torch has CUDA's own libraries; here only the driver is the software GPU's, and all are the child's.
ctypes.CDLL(os.path.join(os.environ["SOFTGPU_LD_LIBRARY_PATH"], "libcuda.so.1"))

sys.path.append(str(pathlib.Path(__file__).parents[2] / "capture/pt2/testdata"))

import models  # type: ignore[import-not-found]  # the hand-written models of the reader's tests

FORWARD, GRADIENTS = 1e-5, 1e-4  # relative, as on the CPU


class Allocation:
    """Memory of the software GPU. One that is freed while the engine uses it ends its process."""

    live = freed = 0

    def __init__(self, size: int) -> None:
        at = ctypes.c_uint64()
        # Not at the beginning of the allocation, as torch's own allocator has it.
        _gpu.driver().inside(0, lambda: _gpu.driver().call(
            "cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size + 512)))
        self.start, self.address = at.value, at.value + 512
        Allocation.live += 1

    def __del__(self) -> None:
        Allocation.live -= 1
        Allocation.freed += 1
        _gpu.driver().inside(0, lambda: _gpu.driver().call("cuMemFree_v2", ctypes.c_uint64(self.start)))


class Software(_gpu.GPU):
    """The methods of a GPU that call torch.cuda, played."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.environment |= {name: os.environ["SOFTGPU_" + name] for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")}

    def allocate(self, size: int) -> tuple[Any, int]:
        memory = Allocation(size)
        return memory, memory.address

    def lease(self, owner: Any, address: int, size: int) -> Any:
        raw: Any = (ctypes.c_char * size).from_address(address)
        raw.owner = owner
        return raw

    def wait(self) -> None:
        _gpu.driver().inside(0, lambda: _gpu.driver().call("cuCtxSynchronize"))


def distance(have: torch.Tensor, want: torch.Tensor) -> float:
    return float((have - want).detach().norm() / want.norm().clamp_min(1e-6))


def batch(rows: int = 2, seq: int = 6) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(rows * seq)
    return {name: torch.randint(0, models.VOCAB, (rows, seq), generator=g) for name in ("input_ids", "labels")}


class GPUTest(unittest.TestCase):
    def setUp(self) -> None:
        self.enterContext(unittest.mock.patch.object(_child, "_space", lambda gpu: Software(0)))
        self.enterContext(unittest.mock.patch.object(_child, "_children", {}))

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, feed: dict[str, torch.Tensor]
             ) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**feed)["loss"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    def test_training_agrees_with_eager(self) -> None:
        """The engine sees what the optimizer wrote, and torch what the engine did."""
        torch.manual_seed(7)
        eager = models.MODELS["nanogpt"]().train()
        model = dw.optimize(copy.deepcopy(eager))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (eager, model)]
        for i in range(6):
            feed = batch(2, 4 + 2 * (i % 2))
            want, have = (self.step(m, o, feed) for m, o in zip((eager, model), optimizers))
            self.assertLess(distance(have, want), 10 * FORWARD, f"step {i}")
            if i == 0:
                self.assertLess(distance(have, want), FORWARD)
                for (name, p), q in zip(eager.named_parameters(), model.parameters()):
                    self.assertLess(distance(q.grad, p.grad), GRADIENTS, name)

    def test_outputs_that_are_saved_as_well(self) -> None:
        """They are copied once, on the GPU."""
        torch.manual_seed(7)
        eager = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        model = dw.optimize(copy.deepcopy(eager))
        x, y = (torch.linspace(-1, 1, 40).view(5, 8).requires_grad_() for _ in range(2))
        want, have = eager(x), model(y)
        self.assertLess(distance(have, want), FORWARD)
        want.square().sum().backward(), have.square().sum().backward()
        assert x.grad is not None and y.grad is not None
        self.assertLess(distance(y.grad, x.grad), GRADIENTS)

    def test_parameters_survive_the_child(self) -> None:
        model = dw.optimize(nn.Linear(8, 8))
        x = torch.ones(2, 8)
        want = model(x).detach().clone()
        weight = model.weight.detach().clone()
        _child.child()._process.send_signal(signal.SIGKILL)
        with self.assertRaisesRegex(dw.Error, "has ended") as caught:
            model(x)
        self.assertEqual(caught.exception.code, "DW2101")
        plain = nn.Linear(8, 8)
        plain.load_state_dict(model.state_dict())
        del model
        gc.collect()
        self.assertTrue(torch.equal(plain.weight, weight))
        self.assertLess(distance(dw.optimize(plain)(x), want), FORWARD)

    def test_memory_is_freed_when_the_child_has_given_it_back(self) -> None:
        """Blocks that are not kept are unmapped and freed, and the child goes on."""
        with unittest.mock.patch.object(_child, "KEPT", 0):
            model = dw.optimize(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
            for i in range(1, 9):
                x = torch.randn(i * 128, 8, requires_grad=True)
                y = model(x)
                y.sum().backward()
                self.assertIsNotNone(x.grad)
                before = Allocation.live
            del x, y
            gc.collect()
            self.assertGreater(Allocation.freed, 10)
            self.assertLess(before, 24)

    def test_memory_without_a_handle_is_refused(self) -> None:
        """As of expandable segments, or of cudaMallocAsync."""
        at = ctypes.c_uint64()
        driver = _gpu.driver()
        driver.inside(0, lambda: driver.call("cuMemAllocAsync", ctypes.byref(at), ctypes.c_size_t(4096), None))
        with self.assertRaisesRegex(dw.Error, "cannot be opened by another process"):
            driver.export(0, at.value)
        with self.assertRaisesRegex(dw.Error, "cannot be opened by another process"):
            driver.export(0, 4096)

    def test_each_gpu_has_its_own_child(self) -> None:
        for visible, want in ((None, "1"), ("3,2", "2"), ("GPU-a,GPU-b", "GPU-b")):
            with unittest.mock.patch.dict(os.environ):
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                if visible is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = visible
                self.assertEqual(_gpu.GPU(1).environment, {"CUDA_VISIBLE_DEVICES": want})


if __name__ == "__main__":
    unittest.main()
