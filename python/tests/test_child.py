"""The process that runs optimized modules: it is killed, its parent forks, is killed or interrupted.
CI runs this file with unittest in the environment that has torch."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time
import unittest
from typing import Any

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("there is no torch")

import torch
from test_optimize import batch, make
from torch import nn

import deepwell as dw
from deepwell import _child


class Interrupted(BaseException):
    """Raised by a signal's handler, between any two instructions."""


class Children(unittest.TestCase):
    def test_killed_child(self) -> None:
        """A child that dies is an error, at once; another module gets another child."""
        plain = make("nanogpt")
        model = dw.optimize(plain, batch())
        loss = model(**batch())["loss"]
        _child.child()._process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with self.assertRaisesRegex(dw.Error, "SIGKILL"):
            loss.backward()
        with self.assertRaisesRegex(dw.Error, "DW2101"):
            model(**batch())
        self.assertLess(time.monotonic() - began, 10)
        again = dw.optimize(plain, batch())
        again(**batch())["loss"].backward()
        self.assertIsNotNone(plain.wte.weight.grad)

    def test_forked_process(self) -> None:
        """A fork has weights and gradients of its own, and cannot call what its parent optimized."""
        model, x = dw.optimize(nn.Linear(4, 4)), torch.ones(2, 4)
        model(x).sum().backward()
        before, grad = model.weight.detach().clone(), model.weight.grad.clone()
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                torch.optim.SGD(model.parameters(), lr=1.0).step()
                model.weight.grad.zero_()
                try:
                    model(x)
                except dw.Error as e:
                    os.write(write, f"{e.what} {torch.equal(model.weight, before - grad)}".encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        with open(read) as said:
            self.assertRegex(said.read(), "belongs to the process that started it.* True$")
        self.assertTrue(torch.equal(model.weight, before) and torch.equal(model.weight.grad, grad))
        for _ in torch.utils.data.DataLoader([1, 2], num_workers=1):
            model(x).sum().backward()

    def test_interrupted_anywhere(self) -> None:
        """Exceptions at any time leave a child that answers as before, and that keeps hardly a call."""
        model, x = dw.optimize(nn.Linear(64, 64)), torch.ones(2, 64)
        want = model(x).detach().clone()
        model(x).sum().backward()
        grad = model.weight.grad.clone()
        process = _child.child()._process
        draw, armed, interrupts = random.Random(1), False, 0

        def handle(*_: Any) -> None:
            if armed:
                raise Interrupted

        def step() -> None:
            x = torch.ones(2, 64, requires_grad=True)
            model(x).sum().backward()

        before = signal.signal(signal.SIGALRM, handle)
        try:
            for _ in range(400):
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1.5e-3))
                try:
                    armed = True
                    step()
                    armed = False
                except Interrupted:
                    interrupts += 1
                finally:
                    armed = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        self.assertGreater(interrupts, 100)
        model.weight.grad = None
        self.assertTrue(torch.equal(model(x), want))
        model(x).sum().backward()
        self.assertTrue(torch.equal(model.weight.grad, grad))
        model(x).sum().backward()
        child = _child.child()
        self.assertIs(child._process, process)
        # An exception inside of a finalizer, or before there is one, leaves a call with the child: 2 of 300.
        self.assertLessEqual(child.live, 2 + interrupts // 10)
        self.assertLessEqual(len(child._stale), 1)

    def test_nothing_outlives_python(self) -> None:
        """The child ends when Python is killed, and an interrupt leaves a module that works."""
        code = textwrap.dedent("""
            import os, signal, sys, threading, torch
            from torch import nn
            import deepwell as dw
            from deepwell import _backend, _child, _runtime
            model = dw.optimize(nn.Linear(64, 64))
            want = model(torch.ones(2, 64)).sum().item()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored in a background job
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                while True:
                    model(torch.ones(2, 64))
            except KeyboardInterrupt:
                pass
            assert model(torch.ones(2, 64)).sum().item() == want
            print(_child.child()._process.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
        self.assertEqual(said.returncode, -signal.SIGKILL, said.stderr)
        pid = int(said.stdout)
        for _ in range(100):
            if not os.path.exists(f"/proc/{pid}") or "Z" in pathlib.Path(f"/proc/{pid}/stat").read_text():
                return
            time.sleep(0.1)
        self.fail(f"process {pid} lives on")


if __name__ == "__main__":
    unittest.main()
