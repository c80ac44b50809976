"""What users change between calls of an optimized module, and between a call and its backward pass,
against eager PyTorch. CI runs this file with unittest in the environment that has torch."""

from __future__ import annotations

import collections
import functools
import importlib.util
import threading
import types
import unittest
import warnings
from typing import Any

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("there is no torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepwell as dw

X = torch.arange(12.).reshape(4, 3) / 7
WRAPPERS: list[Any] = [lambda m: m, dw.optimize, lambda m: torch.compile(m, backend="deepwell")]


class Pair(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x).tanh())
        return y


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("b", torch.full((3, 3), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w * self.v) @ self.b


class Table(nn.Module):
    """Has a table that no state_dict has, too long to be compared number by number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.outer(torch.arange(400_000.), torch.tensor([1, .1, .01])).cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * self.table[:x.shape[0]]


class Compared(unittest.TestCase):
    def same(self, run: Any, make: Any = Pair, wrappers: Any = WRAPPERS[:2]) -> None:
        """Runs something with a module and its call, which gives tensors or the beginning of an error."""
        results: list[Any] = []
        for wrap in wrappers:
            torch.manual_seed(0)
            m = make()
            try:
                results.append([t if t is None else t.detach().clone() for t in run(m, wrap(m))])
            except RuntimeError as e:
                results.append(str(e)[:60])
        want = results[0]
        for have in results[1:]:
            if isinstance(want, str):
                self.assertEqual(have, want)
                continue
            for h, w in zip(have, want, strict=True):
                self.assertEqual(h is None, w is None, f"{h}, eager {w}")
                if h is not None:
                    torch.testing.assert_close(h, w, rtol=1e-5, atol=1e-6, equal_nan=True)


class Replaced(Compared):
    """Memory that the user still has is never written."""

    def test_data_is_put_aside_and_back(self) -> None:
        def run(m: Any, f: Any) -> Any:
            f(X)
            saved = m.a.weight.data
            m.a.weight.data = torch.zeros(3, 3)
            other = f(X)
            m.a.weight.data = saved
            return other, f(X), saved

        self.same(run, wrappers=WRAPPERS)

    def test_parameter_is_put_aside_and_back(self) -> None:
        def run(m: Any, f: Any) -> Any:
            f(X)
            saved = m.a.weight
            m.a.weight = nn.Parameter(torch.zeros(3, 3))
            other = f(X)
            other.sum().backward()
            new, m.a.weight = m.a.weight, saved
            f(X).sum().backward()
            return other, saved, new.grad, saved.grad

        self.same(run)

    def test_functional_call(self) -> None:
        def run(m: Any, f: Any) -> Any:
            f(X)
            w = torch.ones(3, 3, requires_grad=True)
            guest = w * 2
            y = torch.func.functional_call(f, {"a.weight": guest}, (X,))
            with torch.no_grad():
                guest.add_(0)  # its memory is as it was
            z = torch.func.functional_call(f, {"a.weight": w, "b.weight": w.detach()[:, [1, 0, 2]]}, (X,))
            z.sum().backward()
            return y, z, w, w.grad, m.a.weight, m.a.weight.grad, f(X)

        self.same(run)

    def test_two_are_swapped(self) -> None:
        def run(m: Any, f: Any) -> Any:
            f(X)
            m.a.weight, m.b.weight = m.b.weight, m.a.weight
            y = f(X)
            m.a.weight.data, m.b.weight.data = m.b.weight.data, m.a.weight.data
            return y, m.a.weight, m.b.weight, f(X)

        self.same(run)

    def test_other_views_of_the_same_memory(self) -> None:
        def run(m: Any, f: Any) -> Any:
            y = f(X)
            m.a.weight.data = m.a.weight.data.t()
            z = f(X)
            m.b.weight.data = m.b.weight.data[:2]
            return y, z, f(X)

        self.same(run)

    def test_tied_and_untied(self) -> None:
        def run(m: Any, f: Any) -> Any:
            f(X)
            m.b.weight = nn.Parameter(m.a.weight.detach().clone())
            f(X).sum().backward()
            with torch.no_grad():
                m.b.weight.add_(1)
            grads = [m.a.weight.grad, m.b.weight.grad]
            y = f(X)
            m.zero_grad()
            m.b.weight = m.a.weight
            f(X).sum().backward()
            return m.a.weight, y, *grads, m.a.weight.grad

        self.same(run, lambda: Pair(tied=True))

    def test_shared_memory(self) -> None:
        """Two parameters with the same memory still have."""
        def run(m: Any, f: Any) -> Any:
            m.b.weight.data = m.a.weight.data
            f(X)
            with torch.no_grad():
                m.a.weight.mul_(2)
            f(X).sum().backward()
            return m.b.weight, f(X), m.a.weight.grad, m.b.weight.grad

        self.same(run)


class Between(Compared):
    """Between a call and its backward pass."""

    def test_written_in_place(self) -> None:
        for name in ("v", "b"):
            def run(m: Any, f: Any, name: str = name) -> Any:
                y = f(X)
                with torch.no_grad():
                    getattr(m, name).mul_(5)
                y.sum().backward()
                return m.w.grad, m.v.grad

            with self.subTest(name):
                self.same(run, Scales)

    def test_bias_is_written(self) -> None:
        """The backward pass does not read it, here as there."""
        def run(m: Any, f: Any) -> Any:
            y = f(X)
            with torch.no_grad():
                m.bias.mul_(5)
            y.sum().backward()
            return m.weight.grad, m.bias.grad

        self.same(run, lambda: nn.Linear(3, 3))

    def test_replaced_and_called_again(self) -> None:
        others = {"v": lambda: nn.Parameter(torch.full((3,), 10.0)), "b": lambda: torch.full((3, 3), 10.0),
                  "w": lambda: nn.Parameter(torch.ones(1))}
        for name, other in others.items():
            def run(m: Any, f: Any, name: str = name, other: Any = other) -> Any:
                y, old = f(X), m.v
                setattr(m, name, other())
                z = f(X)
                y.sum().backward()
                grads = [m.v.grad, old.grad, m.w.grad]
                z.sum().backward()
                return y, z, *grads, m.v.grad, m.w.grad

            with self.subTest(name):
                self.same(run, Scales)


class Gradients(Compared):
    def test_output_without_a_slope(self) -> None:
        """Nothing is computed for it: no 0 · ∞, and no gradient for what only it depends on."""
        class Roots(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w, self.u = nn.Parameter(torch.tensor([0.0, 1.0])), nn.Parameter(torch.ones(2))

            def forward(self, x: torch.Tensor) -> Any:
                return (self.w * x).sqrt() * self.u, self.w * x * 2

        def run(m: Any, f: Any, *used: int) -> Any:
            for one in used:
                x = torch.ones(2, requires_grad=True)
                f(x)[one].sum().backward()
            return m.w.grad, m.u.grad, x.grad

        for used in ((1,), (0,), (1, 0)):
            with self.subTest(used):
                self.same(lambda m, f: run(m, f, *used), Roots, WRAPPERS)

    def test_zero_is_not_none(self) -> None:
        class Nothing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.w * 0.0

        def run(m: Any, f: Any) -> Any:
            f(X).sum().backward()
            return (m.w.grad,)

        self.same(run, Nothing)

    def test_tensors_that_are_no_parameters(self) -> None:
        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.h = torch.ones(3)
                self.register_buffer("b", torch.ones(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.h * self.b

        m = Plain()
        model, w = dw.optimize(m), torch.ones(3, requires_grad=True)
        model(X)
        for name in ("h", "b"):
            for t in (torch.ones(3, requires_grad=True), w * 2):
                setattr(m, name, t)
                with self.assertRaisesRegex(dw.Error, f"{name} is no parameter and requires a gradient"):
                    model(X)
                with torch.no_grad():
                    self.assertTrue(torch.equal(model(X), m(X)))
            setattr(m, name, torch.ones(3))
            model(X)
            getattr(m, name).requires_grad_()
            with self.assertRaisesRegex(dw.Error, f"{name} is no parameter"):
                model(X)
            setattr(m, name, torch.ones(3))

    def test_checkpoint(self) -> None:
        def run(m: Any, f: Any, before: bool) -> Any:
            if before:
                f(X).sum().backward()
            x = X.clone().requires_grad_()
            checkpoint(f, x, use_reentrant=False).sum().backward()
            return m.a.weight.grad, x.grad

        for before in (False, True):
            with self.subTest(before):
                self.same(lambda m, f: run(m, f, before))


class Watched(Compared):
    def test_attributes(self) -> None:
        """A change of anything that an export has read makes another one."""
        class AttrDict(dict[str, float]):
            pass

        class List(list[float]):
            pass

        class Config:
            scale = 2.0

        class Slots:
            __slots__ = ("scale",)

        class Scaled(nn.Module):
            shared = {"scale": 2.0}

            def __init__(self, config: Any, get: Any) -> None:
                super().__init__()
                self.config, self.get = config, get

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = x * self.get(self.config)
                return y

        space = types.SimpleNamespace
        put = functools.partial(setattr)
        slots = Slots()
        slots.scale = 2.0  # type: ignore[attr-defined]
        array = torch.full((1,), 2.0).numpy()
        cases: dict[str, tuple[Any, Any, Any]] = {
            "dict subclass": (AttrDict(scale=2.0), lambda c: c["scale"], lambda c: c.update(scale=3.0)),
            "its attribute": (AttrDict(), lambda c: len(vars(c)) + 1, lambda c: put(c, "x", 1)),
            "list subclass": (List([2.0]), lambda c: c[0], lambda c: c.__setitem__(0, 3.0)),
            "Counter": (collections.Counter(a=2), lambda c: c["a"], lambda c: c.update(a=1)),
            "deque": (collections.deque([2.0]), lambda c: c[0], lambda c: c.appendleft(3.0)),
            "set": ({2.0}, lambda c: max(c), lambda c: c.add(3.0)),
            "dict of objects": ({"a": space(s=2.0)}, lambda c: c["a"].s, lambda c: put(c["a"], "s", 3.0)),
            "list of objects": ([space(s=2.0)], lambda c: c[0].s, lambda c: put(c[0], "s", 3.0)),
            "object with a list of objects": (space(l=[space(s=2.0)]), lambda c: c.l[0].s,
                                              lambda c: put(c.l[0], "s", 3.0)),
            "4 deep": (space(a=space(b=space(c=space(s=2.0)))), lambda c: c.a.b.c.s,
                       lambda c: put(c.a.b.c, "s", 3.0)),
            "slots": (slots, lambda c: c.scale, lambda c: put(c, "scale", 3.0)),
            "attribute of the class": (Config(), lambda c: c.scale, lambda c: put(Config, "scale", 3.0)),
            "a class": (type("C", (), {"scale": 2.0}), lambda c: c.scale, lambda c: put(c, "scale", 3.0)),
            "array": (array, lambda c: float(c[0]), lambda c: c.__setitem__(0, 3.0)),
            "bytearray": (bytearray(b"\2"), lambda c: c[0], lambda c: c.__setitem__(0, 3)),
            "partial": (functools.partial(int, s=2.0), lambda c: c.keywords["s"],
                        lambda c: c.keywords.update(s=3.0)),
            "method": (space(s=[2.0]).s.__getitem__, lambda c: c(0), lambda c: c.__self__.__setitem__(0, 3.0)),
            "sign of 0": (space(s=0.0), lambda c: torch.ones(()).div(torch.full((), c.s)),
                          lambda c: put(c, "s", -0.0)),
            "type of a number": ([1], lambda c: 2.0 if c[0] is True else 3.0, lambda c: c.__setitem__(0, True)),
        }
        for name, (config, get, change) in cases.items():
            with self.subTest(name):
                m = Scaled(config, get)
                model = dw.optimize(m)
                runtime = type(model)._deepwell
                for _ in range(2):
                    torch.testing.assert_close(model(X), m(X), equal_nan=True)
                self.assertEqual(runtime.exports, 1)
                change(config)
                torch.testing.assert_close(model(X), m(X), equal_nan=True)
        m = Scaled(None, lambda _: Scaled.shared["scale"])
        m.get = types.MethodType(lambda self, _: self.shared["scale"], m)
        model = dw.optimize(m)
        model(X)
        Scaled.shared["scale"] = 3.0
        torch.testing.assert_close(model(X), m(X))

    def test_table_in_no_state_dict(self) -> None:
        def run(m: Any, call: Any) -> Any:
            yield call(X)
            yield call(X[:2])
            yield call(X)
            if hasattr(type(m), "_deepwell"):
                self.assertEqual(type(m)._deepwell.exports, 1)
            m.table.mul_(2)
            yield call(X)
            m.table = m.table[:50_000].clone()
            y = call(X)
            y.square().sum().backward()
            yield from (y, m.w.grad)
        self.same(run, Table)

    def test_more_than_is_watched(self) -> None:
        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.all = [types.SimpleNamespace(s=2.0) for _ in range(1000)]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = x * self.all[999].s
                return y

        with self.assertWarnsRegex(UserWarning, r"reads all\[5.*, which holds more than is watched"):
            dw.optimize(Many())(X)

    def test_numbers_as_arguments(self) -> None:
        class Divides(nn.Module):
            def forward(self, x: torch.Tensor, c: float) -> torch.Tensor:
                return (x + 1) / torch.full_like(x, c)

        m = Divides()
        model = dw.optimize(m)
        for c in (0.0, -0.0, 0.0, -0.0):
            torch.testing.assert_close(model(X, c), m(X, c), equal_nan=True)
        self.assertEqual(type(model)._deepwell.exports, 2)

    def test_several_threads(self) -> None:
        m = nn.Linear(3, 2)
        model, wrong = dw.optimize(m), []

        def run(i: int) -> None:
            try:
                for k in range(6):
                    x = torch.randn(2 + (i + k) % 3, 3)
                    torch.testing.assert_close(model(x), m(x))
            except BaseException as e:
                wrong.append(e)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])


class Checked(unittest.TestCase):
    def test_whole_numbers_and_nan(self) -> None:
        class Both(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return x.log(), (x > 0).long(), x > 1, 1 / x

        x = torch.tensor([1.0, -1.0, 0.0])
        self.assertTrue(dw.check(Both(), x))
        from deepwell import _check

        for have, want in (([1, 2], [1, 3]), ([True], [False]), ([float("nan")], [1.0]), ([1.0], [float("nan")]),
                           ([float("inf")], [-float("inf")]), ([1.0], [1])):
            d = _check._compared("y", torch.tensor(have), torch.tensor(want), 1e-5)
            self.assertGreater(d.distance, d.bound, (have, want))

    def test_what_torch_cannot_save(self) -> None:
        class Rounded(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * round(x.shape[0] / 3)

        with self.assertRaisesRegex(dw.Error, "torch.export cannot save the module"):
            dw.optimize(Rounded())(X)


class Trained(unittest.TestCase):
    def test_dropout_in_eval_mode(self) -> None:
        class Drops(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.e, self.drop, self.o = nn.Embedding(11, 8), nn.Dropout(0.5), nn.Linear(8, 11)

            def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = self.o(self.drop(self.e(input_ids)))
                return y

        with self.assertRaisesRegex(dw.Error, "drop drops with a probability of 0.5.*given in eval mode"):
            dw.capture(Drops().eval(), seq_len=8)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    unittest.main()
