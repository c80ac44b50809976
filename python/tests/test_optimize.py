"""optimize, torch.compile's backend and check, against eager PyTorch. They need torch; CI runs this
file with unittest in the environment that has it."""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import pathlib
import pickle
import sys
import types
import unittest
import unittest.mock
import warnings
from typing import Any

if importlib.util.find_spec("torch") is None:
    raise unittest.SkipTest("there is no torch")

import torch
from torch import nn
from torch.nn import functional as F

import deepwell as dw
from deepwell import _backend, _child, _runtime

sys.path.append(str(pathlib.Path(__file__).parents[2] / "capture/pt2/testdata"))

import models  # type: ignore[import-not-found]  # the hand-written models of the reader's tests

FORWARD, GRADIENTS = 1e-5, 1e-4  # relative, as everywhere in f32


def distance(have: torch.Tensor, want: torch.Tensor) -> float:
    return float((have - want).detach().norm() / want.norm().clamp_min(1e-6))


def batch(rows: int = 2, seq: int = 6, seed: int = 1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, models.VOCAB, (rows, seq), generator=g),
            "labels": torch.randint(0, models.VOCAB, (rows, seq), generator=g)}


def make(name: str) -> Any:
    torch.manual_seed(7)
    return models.MODELS[name]().train()


class Logits(nn.Module):
    """A model that returns logits alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.body = make(name)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body.wte(ids) + self.body.wpe(torch.arange(ids.shape[1]))
        for block in self.body.h:
            x = block(x)
        y: torch.Tensor = self.body.lm_head(self.body.ln_f(x))
        return y


def llama(**more: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, **more)
    return transformers.LlamaForCausalLM(config).train()


class Optimized(unittest.TestCase):
    def agree(self, model: Any, eager: Any, feed: dict[str, torch.Tensor]) -> None:
        """One forward and backward pass of both."""
        have, want = model(**feed), eager(**feed)
        self.assertIs(type(have), type(want))
        self.assertLess(distance(have["logits"], want["logits"]), FORWARD)
        self.assertLess(distance(have["loss"], want["loss"]), FORWARD)
        have["loss"].backward()
        want["loss"].backward()
        for (name, p), q in zip(model.named_parameters(), eager.parameters()):
            self.assertLess(distance(p.grad, q.grad), GRADIENTS, name)

    def test_models(self) -> None:
        for name in ("nanogpt", "tied", "einsum"):
            with self.subTest(name):
                eager = make(name)
                model = dw.optimize(copy.deepcopy(eager), batch())
                self.agree(model, eager, batch())

    def test_transformers(self) -> None:
        eager = llama()
        plain = copy.deepcopy(eager)
        before = plain.config._attn_implementation
        model = dw.optimize(plain, batch())
        self.agree(model, eager, batch())
        self.assertEqual(plain.config._attn_implementation, before)
        self.assertIsInstance(model, type(eager))
        with torch.no_grad():
            self.assertEqual(model.generate(batch()["input_ids"], max_new_tokens=3).shape, (2, 9))

    def test_it_is_the_users_module(self) -> None:
        plain = make("tied")
        model = dw.optimize(plain)
        self.assertEqual(list(model.state_dict()), list(plain.state_dict()))
        self.assertIs(model.wte.weight, plain.wte.weight)
        model.eval()
        self.assertFalse(plain.training)
        self.assertIs(type(pickle.loads(pickle.dumps(model))), type(plain))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        self.assertIs(type(again), type(plain))
        self.assertTrue(torch.equal(again.wte.weight, plain.wte.weight))

    def test_copies_are_optimized(self) -> None:
        model = dw.optimize(make("tied").eval())
        other = copy.deepcopy(model)
        with torch.no_grad():
            before = model(**batch())["logits"]
            self.assertTrue(torch.equal(other(**batch())["logits"], before))
            other.wte.weight.zero_()
            self.assertEqual(float(other(**batch())["logits"].abs().max()), 0)
            self.assertTrue(torch.equal(model(**batch())["logits"], before))
        self.assertIsNot(type(other)._deepwell, type(model)._deepwell)

    def test_gradients_of_gradients_are_refused(self) -> None:
        x = torch.randn(3, 4, requires_grad=True)
        y = dw.optimize(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))(x)
        with self.assertRaisesRegex(RuntimeError, "no gradients of gradients"):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    def test_what_is_no_module_on_the_cpu_is_refused(self) -> None:
        with self.assertRaisesRegex(TypeError, "takes a torch.nn.Module, not a function"):
            dw.optimize(lambda x: x)
        with self.assertRaisesRegex(dw.Error, "weight is on meta"):
            dw.optimize(nn.Linear(2, 2, device="meta"))

    def test_numbers_out_of_range(self) -> None:
        """Where eager raises IndexError, so does the engine."""
        def with_ones(name: str, value: int) -> dict[str, torch.Tensor]:
            feed = batch()
            feed[name][1, 2] = value
            return feed

        long = {k: v.repeat(1, 20) for k, v in batch().items()}
        wrong = [("input_ids", with_ones("input_ids", models.VOCAB)), ("input_ids", with_ones("input_ids", -1)),
                 ("labels", with_ones("labels", models.VOCAB)), ("labels", with_ones("labels", -5)),
                 ("wpe.weight has rows 0 to", long)]
        eager = make("nanogpt")
        model = dw.optimize(copy.deepcopy(eager))
        compiled = torch.compile(copy.deepcopy(eager), backend=_backend.backend)
        for name, feed in wrong:
            with self.assertRaises(IndexError):
                eager(**feed)
            for other in (model, compiled):
                with self.subTest(name), self.assertRaisesRegex(IndexError, name if other is model else ""):
                    other(**feed)
        self.agree(model, eager, with_ones("labels", -100))

    def test_own_loop(self) -> None:
        """Twenty steps of the user's loss and optimizer end where eager ones do."""
        for name in ("nanogpt", "tied"):
            with self.subTest(name):
                self.loop(Logits(name))

    def loop(self, eager: Any) -> None:
        model = dw.optimize(copy.deepcopy(eager), batch()["input_ids"])
        losses = []
        for m in (model, eager):
            adam = torch.optim.AdamW(m.parameters(), lr=1e-2)
            own = []
            for step in range(20):
                feed = batch(4, 8, step)
                loss = F.cross_entropy(m(feed["input_ids"]).flatten(0, 1), feed["labels"].flatten())
                adam.zero_grad()
                loss.backward()
                adam.step()
                own.append(loss.item())
            losses.append(own)
        for have, want in zip(*losses):
            self.assertLess(abs(have - want), 1e-4 * want)
        for (name, p), q in zip(model.named_parameters(), eager.named_parameters()):
            self.assertLess(distance(p, q[1]), 1e-3, name)

    def test_many_layers(self) -> None:
        """More than 32 layers are a loop, whose parameters follow each other in memory."""
        with unittest.mock.patch.object(models, "LAYERS", 33):
            eager = make("nanogpt")
        model = dw.optimize(copy.deepcopy(eager), batch())
        self.assertIn("a loop of 33 rounds", str(model.report))
        self.agree(model, eager, batch())
        for m in (model, eager):
            m.zero_grad()
            with torch.no_grad():
                m.h[20].mlp[0].weight.mul_(2)
        self.agree(model, eager, batch())

    def test_shapes_modes_and_counts(self) -> None:
        eager = make("nanogpt")
        model = dw.optimize(copy.deepcopy(eager))
        runtime = type(model)._deepwell
        self.agree(model, eager, batch(2, 6))
        self.agree(model, eager, batch(3, 9))
        self.assertEqual((runtime.exports, runtime.compiles), (1, 2))
        model.eval(), eager.eval()
        with torch.no_grad():
            have, want = model(**batch()), eager(**batch())
        self.assertFalse(have["logits"].requires_grad)
        self.assertLess(distance(have["logits"], want["logits"]), FORWARD)
        self.assertEqual((runtime.exports, runtime.compiles), (2, 3))

    def test_sizes_of_one(self) -> None:
        eager = make("nanogpt")
        model = dw.optimize(copy.deepcopy(eager))
        for rows, seq in ((2, 6), (1, 6), (3, 1), (1, 1)):
            self.agree(model, eager, batch(rows, seq))

    def test_types(self) -> None:
        """bf16 modules, and autocast, which is another program of the same module."""
        self.assertTrue(dw.check(make("nanogpt").bfloat16(), batch()))
        eager = make("nanogpt")
        model = dw.optimize(copy.deepcopy(eager))
        for kind in (torch.float32, torch.bfloat16, torch.float32):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
                have, want = model(**batch())["logits"], eager(**batch())["logits"]
            self.assertEqual((have.dtype, want.dtype), (kind, kind))
            self.assertLess(distance(have.float(), want.float()), 1e-2 if kind == torch.bfloat16 else FORWARD)
        model.to(torch.bfloat16)
        self.assertEqual(model(**batch())["logits"].dtype, torch.bfloat16)

    def test_order_of_backward_passes(self) -> None:
        """Two calls before either backward pass, in either order, and accumulated gradients."""
        eager = make("nanogpt")
        model = dw.optimize(copy.deepcopy(eager))
        for order in ((0, 1), (1, 0)):
            model.zero_grad(), eager.zero_grad()
            for m in (model, eager):
                losses = [m(**batch(seed=s))["loss"] for s in (4, 5)]
                for i in order:
                    losses[i].backward()
            for p, q in zip(model.parameters(), eager.parameters()):
                self.assertLess(distance(p.grad, q.grad), GRADIENTS)

    def test_graph_is_retained(self) -> None:
        model = dw.optimize(make("nanogpt"))
        loss = model(**batch())["loss"]
        loss.backward(retain_graph=True)
        once = model.wte.weight.grad.clone()
        loss.backward()
        self.assertLess(distance(model.wte.weight.grad, 2 * once), 1e-6)
        with self.assertRaisesRegex(RuntimeError, "second time"):
            loss.backward()

    def test_changed_before_backward(self) -> None:
        """A weight that changes between the passes is torch's own error, as in eager PyTorch."""
        model = dw.optimize(make("nanogpt"))
        loss = model(**batch())["loss"]
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_many_shapes(self) -> None:
        model = dw.optimize(nn.Linear(4, 4))
        with torch.no_grad(), self.assertWarnsRegex(UserWarning, "pad inputs"):
            for rows in range(2, 12):
                model(torch.ones(rows, 4))

    def test_memory_is_freed(self) -> None:
        """Calls are forgotten after their backward pass, or when nobody can ask for it."""
        model = dw.optimize(make("nanogpt"))
        gc.collect()  # what other tests have left
        child = _child.child()
        before = child.request("hello")["live"]
        for _ in range(5):
            model(**batch())["loss"].backward()
            model(**batch())
        with torch.no_grad():
            model(**batch())
        self.assertEqual(child.live, before)

    def test_outputs_are_the_users(self) -> None:
        """An output that is kept is not written by a later call."""
        model = dw.optimize(make("nanogpt"))
        first = model(**batch(seed=1))["logits"]
        kept = first.detach().clone()
        model(**batch(seed=2))
        self.assertTrue(torch.equal(first, kept))

    def test_inputs_have_gradients(self) -> None:
        eager = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        model = dw.optimize(copy.deepcopy(eager))
        x, y = (torch.ones(3, 8, requires_grad=True) for _ in range(2))
        model(x).square().sum().backward()
        eager(y).square().sum().backward()
        assert x.grad is not None and y.grad is not None
        self.assertLess(distance(x.grad, y.grad), GRADIENTS)

    def test_dropout(self) -> None:
        """Masks are drawn for each call, by torch's generator; a backward pass has those of its call."""
        model = dw.optimize(make("dropout"))
        torch.manual_seed(5)
        first, second = (model(**batch())["loss"] for _ in range(2))
        torch.manual_seed(5)
        again = model(**batch())["loss"]
        self.assertNotEqual(first.item(), second.item())
        self.assertEqual(first.item(), again.item())
        grads = [torch.autograd.grad(loss, model.lm_head.weight)[0] for loss in (second, first, again)]
        self.assertTrue(torch.equal(grads[1], grads[2]))
        self.assertFalse(torch.equal(grads[0], grads[1]))
        mean = sum(model(**batch())["loss"].item() for _ in range(40)) / 40
        model.eval()
        self.assertLess(abs(mean - model(**batch())["loss"].item()), 0.3)
        # Half of what goes through is dropped, and the rest made up for it.
        half = dw.optimize(nn.Dropout(0.5))(torch.ones(64, 64))
        self.assertEqual(sorted(set(half.flatten().tolist())), [0.0, 2.0])
        self.assertLess(abs(half.mean().item() - 1), 0.1)

    def test_dropout_in_attention(self) -> None:
        """With the probability near 0 attention is as without; with a half, its mean is."""
        class Attend(nn.Module):
            def __init__(self, p: float) -> None:
                super().__init__()
                self.p = p

            def forward(self, q: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=self.p)

        q = torch.randn(2, 4, 6, 8)
        want = Attend(0.0)(q)
        self.assertLess(distance(dw.optimize(Attend(1e-9))(q), want), FORWARD)
        model = dw.optimize(Attend(0.5))
        self.assertGreater(distance(model(q), want), 0.1)
        mean = torch.stack([model(q) for _ in range(400)]).mean(0)
        self.assertLess(distance(mean, want), 0.1)
        import transformers

        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)).train()
        dw.optimize(gpt2)(**batch())["loss"].backward()
        self.assertTrue(all(p.grad is not None and p.grad.isfinite().all() for p in gpt2.parameters()))

    def test_masks_of_padding(self) -> None:
        eager = llama()
        model = dw.optimize(copy.deepcopy(eager))
        feed = batch(3, 8)
        mask = torch.ones(3, 8, dtype=torch.long)
        mask[1, 5:] = 0
        mask[2, 3:] = 0
        feed = {**feed, "attention_mask": mask, "labels": feed["labels"].masked_fill(mask == 0, -100)}
        have, want = model(**feed), eager(**feed)
        self.assertLess(distance(have["loss"], want["loss"]), FORWARD)
        seen = mask.bool()
        self.assertLess(distance(have["logits"][seen], want["logits"][seen]), FORWARD)
        have["loss"].backward(), want["loss"].backward()
        for (name, p), q in zip(model.named_parameters(), eager.parameters()):
            self.assertLess(distance(p.grad, q.grad), GRADIENTS, name)

    def test_mask_of_scores(self) -> None:
        class Masked(nn.Module):
            def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

        q = torch.randn(2, 4, 6, 8)
        for mask in (torch.rand(2, 1, 6, 6) > 0.3, torch.randn(2, 1, 6, 6)):
            if mask.dtype == torch.bool:
                mask[..., 0] = True
            self.assertLess(distance(dw.optimize(Masked())(q, mask), Masked()(q, mask)), FORWARD)

    def test_inference_comes_first(self) -> None:
        eager = make("nanogpt")
        model = dw.optimize(copy.deepcopy(eager))
        with torch.inference_mode():
            self.assertLess(distance(model(**batch())["logits"], eager(**batch())["logits"]), FORWARD)
        self.agree(model, eager, batch())

    def test_frozen_and_replaced_parameters(self) -> None:
        eager = make("nanogpt")
        model = dw.optimize(copy.deepcopy(eager))
        self.agree(model, eager, batch())
        for m in (model, eager):
            m.zero_grad()
            m.wte.weight.requires_grad_(False)
            m.wpe.weight.data = m.wpe.weight.data * 0.5  # another memory
            m.lm_head.weight = nn.Parameter(m.lm_head.weight.detach() * 2)  # another parameter
        have, want = model(**batch()), eager(**batch())
        self.assertLess(distance(have["loss"], want["loss"]), FORWARD)
        have["loss"].backward(), want["loss"].backward()
        self.assertIsNone(model.wte.weight.grad)
        self.assertLess(distance(model.lm_head.weight.grad, eager.lm_head.weight.grad), GRADIENTS)

    def test_changed_parts(self) -> None:
        """A part that is replaced, or added, or in another mode, makes another program."""
        eager = make("dropout")
        model = dw.optimize(copy.deepcopy(eager))
        model(**batch())
        for m in (model, eager):
            torch.manual_seed(9)
            m.lm_head = nn.Linear(models.EMBED, models.VOCAB, bias=False)
            for part in m.modules():
                if isinstance(part, nn.Dropout):
                    part.eval()
            m.h[0].attn.out = nn.Sequential(m.h[0].attn.out, nn.Tanh())
        self.agree(model, eager, batch())

    def close(self, model: Any, eager: Any, *args: Any) -> None:
        """A call of both, without gradients."""
        with torch.no_grad():
            have, want = model(*args), eager(*args)
        self.assertEqual(have.dtype, want.dtype)
        self.assertTrue(torch.allclose(have, want, atol=1e-5, equal_nan=True), f"{have}, eager {want}")

    def test_what_an_export_reads(self) -> None:
        """Attributes, flags and hooks that an export has read make another one, and no others do."""
        class Part(nn.Module):
            shift = 0.0

            def __init__(self) -> None:
                super().__init__()
                self.linear, self.drop, self.plain = nn.Linear(4, 4), nn.Dropout(0.0), torch.ones(4)
                self.scale, self.active, self.keys, self.steps = 2.0, True, {"by": [1.0]}, 0
                self.config = types.SimpleNamespace(inner=types.SimpleNamespace(factors=[1.0]))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.linear(x) * self.scale * self.keys["by"][0] * self.plain + self.shift
                y = y * self.config.inner.factors[0]
                return self.drop(y.relu() if self.active else y)

        eager = nn.Sequential(Part(), Part())
        model, x = dw.optimize(eager), torch.randn(3, 4)
        runtime, part = type(model)._deepwell, eager[1]
        self.close(model, eager, x)

        def hook() -> None:
            self.hook = part.linear.register_forward_hook(lambda module, args, y: y * 0.5)

        changes: list[tuple[Any, int]] = [  # and how many exports there are then
            (lambda: setattr(part, "scale", 5.0), 2), (lambda: setattr(part, "scale", 2.0), 2),
            (lambda: setattr(part, "active", False), 3), (lambda: setattr(part, "steps", 1), 3),
            (lambda: part.keys["by"].__setitem__(0, 3.0), 4), (lambda: part.plain.mul_(2), 5),
            (lambda: setattr(part, "plain", torch.zeros(4)), 6), (lambda: setattr(part, "shift", 1.0), 7),
            (hook, 8), (lambda: self.hook.remove(), 8), (lambda: part.drop.eval(), 9),
            (lambda: setattr(part.linear, "forward", lambda x: x), 10), (lambda: None, 10),
            (lambda: part.config.inner.factors.__setitem__(0, 2.0), 11)]
        with self.assertWarnsRegex(UserWarning, "for the 8th time"):
            for i, (change, exports) in enumerate(changes):
                change()
                with self.subTest(i):
                    self.close(model, eager, x)
                    self.assertEqual(runtime.exports, exports)

    def test_attributes_that_forward_changes(self) -> None:
        class Counts(nn.Module):
            calls = 0

            def __init__(self) -> None:
                super().__init__()
                self.calls = 1

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return x * self.calls

        with self.assertWarnsRegex(UserWarning, "changes calls, which calls of an optimized module do not"):
            dw.optimize(Counts())(torch.ones(2))

    def test_hooks(self) -> None:
        """A module's own run around a call; those of parts are exported, or refused by name."""
        eager, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
        eager.register_forward_hook(lambda module, args, y: y * 2)
        seen: list[torch.Tensor] = []
        eager.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model = dw.optimize(eager)
        self.close(model, eager, x)
        model(x)
        self.assertEqual([type(t) for t in seen], [torch.Tensor] * 3)
        refused: list[tuple[Any, str]] = [
            (lambda: eager[0].register_forward_hook(lambda *_: None), "0 has a forward hook"),
            (lambda: eager[0].register_full_backward_hook(lambda *_: None), "0 has a backward hook")]
        for add, word in refused:
            handle = add()
            with self.assertRaisesRegex(dw.Error, word):
                model(x)
            handle.remove()
        self.close(model, eager, x)

    def test_constants_that_change(self) -> None:
        """A mask is a constant of the program until somebody writes into it."""
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mask", torch.ones(5, 5).tril().bool())
                self.register_buffer("bias", torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -1e9))
                self.register_buffer("some", None)

            def forward(self, q: torch.Tensor) -> torch.Tensor:
                y = F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)
                z = (q @ q.transpose(-1, -2) + self.bias).softmax(-1) @ q
                return y + z if self.some is None else y + z + self.some

        eager = Masked()
        model, q = dw.optimize(eager), torch.randn(1, 2, 5, 4)
        runtime = type(model)._deepwell
        self.close(model, eager, q)
        near = [(torch.arange(5)[:, None] - torch.arange(5) < n).logical_and(eager.mask) for n in (2, 3)]
        changes: list[tuple[Any, int]] = [
            (lambda: eager.load_state_dict(eager.state_dict()), 1),  # the same values
            (lambda: eager.mask.copy_(near[0]), 2), (lambda: setattr(eager, "mask", near[1]), 3),
            (lambda: eager.bias.zero_(), 4), (lambda: setattr(eager, "some", torch.ones(4)), 5)]
        for i, (change, exports) in enumerate(changes):
            change()
            with self.subTest(i):
                self.close(model, eager, q)
                self.assertEqual(runtime.exports, exports)

    def test_whole_numbers_of_64_bits(self) -> None:
        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("by", torch.tensor([2**40 + 1, 2**25 + 1, 3]))

            def forward(self, i: torch.Tensor) -> Any:
                return i * i, i * self.by, i + 2**33, i.sum(-1), (i.float() * 1e3).long(), i * 1_000_003

        i = torch.tensor([[2**30, 12345, -7], [2**30, 2**21, 5]])
        for have, want in zip(dw.optimize(Whole())(i), Whole()(i), strict=True):
            self.assertTrue(torch.equal(have, want), f"{have}, eager {want}")

    def test_numbers_along_axes(self) -> None:
        """Numbers that are out of range raise what eager raises, along any axis and of any size."""
        chosen: dict[str, Any] = {
            "gather": lambda x, i: x.gather(-1, i[:, :1, None].expand(3, 5, 4)),
            "index_select": lambda x, i: x.index_select(1, i[0]), "rows": lambda x, i: x[i],
            "one_hot": lambda x, i: nn.functional.one_hot(i, 5) * x[:, :2, :1],
            "one_hot of one": lambda x, i: nn.functional.one_hot(i[0, 1], 4) * x,
            "scatter_reduce": lambda x, i: x.scatter_reduce(1, i[:, :, None], x[:, :2, :1], "sum"),
            "places": lambda x, i: x[:, :, i[1]], "index_add": lambda x, i: x.index_add(2, i[0], x[:, :, :2])}

        class Choose(nn.Module):
            def __init__(self, name: str) -> None:
                super().__init__()
                self.w, self.name = nn.Parameter(torch.ones(4)), name

            def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
                return chosen[self.name](x * self.w, i)

        x = torch.randn(3, 5, 4)
        for name in chosen:
            eager = Choose(name)
            model = dw.optimize(eager)
            self.close(model, eager, x, torch.tensor([[0, 1], [2, 1], [1, 0]]))
            for wrong in (9, -9):
                i = torch.full((3, 2), wrong)
                with self.subTest(name), self.assertRaises((IndexError, RuntimeError)) as want:
                    eager(x, i)
                with self.subTest(name), self.assertRaisesRegex(type(want.exception), f"i has the number {wrong}"):
                    model(x, i)

    def test_sizes_that_a_module_asks_about(self) -> None:
        """Another size is another export where the module went another way, and not an error."""
        class Asks(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                rows, columns = x.shape
                return x * 2 + (1 if rows == columns else 0) + (10 if rows + columns > 9 else 0)

        model = dw.optimize(Asks())
        for sizes in ((3, 3), (3, 5), (4, 4), (2, 7), (5, 5), (7, 4), (3, 3), (1, 4)):
            with self.subTest(sizes):
                self.close(model, Asks(), torch.randn(sizes))

    def test_no_elements(self) -> None:
        eager = nn.Linear(4, 2)
        model = dw.optimize(copy.deepcopy(eager))
        for rows in (3, 0):
            model(torch.ones(rows, 4)).sum().backward(), eager(torch.ones(rows, 4)).sum().backward()
            self.assertLess(distance(model.weight.grad, eager.weight.grad), GRADIENTS)
        self.assertEqual(model(torch.ones(0, 4)).shape, (0, 2))
        self.assertIn("2 calls without elements ran in PyTorch", str(model.report))

    def test_types_as_eager(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "same dtype, but got"):
            dw.optimize(nn.Linear(4, 4))(torch.ones(2, 4, dtype=torch.float64))

        class Sums(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.relu().sum(dim=[])

        class Clamps(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.clamp(-1, 1).sum() + x.clamp(min=0).sum() + x.clamp(max=2).sum()

        edges: list[tuple[nn.Module, float]] = [(Sums(), float("nan")), (Clamps(), 1.0)]
        for module, first in edges:
            x, y = (torch.tensor([[[first, -1.0, 0.0, 2.0]]], requires_grad=True) for _ in range(2))
            have, want = dw.optimize(module)(x), module(y)
            self.assertEqual(have.shape, want.shape)
            have.backward(), want.backward()
            assert x.grad is not None and y.grad is not None
            self.assertEqual(x.grad.tolist(), y.grad.tolist())

    def test_outputs_that_change_in_place(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> Any:
                y = self.linear(x)
                return y, y.clone()

        eager, x = Two(), torch.randn(3, 4)
        model = dw.optimize(copy.deepcopy(eager))
        for m in (model, eager):
            y, z = m(x)
            y.mul_(3).add_(1)
            (y.square().sum() + z.sum()).backward()
        self.assertLess(distance(model.linear.weight.grad, eager.linear.weight.grad), GRADIENTS)

    def test_queries_that_see_no_key(self) -> None:
        class Masked(nn.Module):
            def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

        class Filled(nn.Module):
            def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
                scores = (q @ q.transpose(-1, -2)).masked_fill(mask < 0, float("-inf"))
                return scores.softmax(-1) @ q  # NaN, in eager PyTorch, too

        mask = torch.zeros(1, 1, 4, 4)
        mask[..., 2, :] = float("-inf")
        self.close(dw.optimize(Filled()), Filled(), torch.randn(1, 2, 4, 4), mask)
        x, y = (torch.arange(32.0).view(1, 2, 4, 4).sin().requires_grad_() for _ in range(2))
        have, want = dw.optimize(Masked())(x, mask), Masked()(y, mask)
        self.assertLess(distance(have, want), FORWARD)
        have.square().sum().backward(), want.square().sum().backward()
        assert x.grad is not None and y.grad is not None
        self.assertLess(distance(x.grad, y.grad), GRADIENTS)

    def test_two_modules(self) -> None:
        """One module feeds another, and a gradient flows through both."""
        first, second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())
        a, b = dw.optimize(copy.deepcopy(first)), dw.optimize(copy.deepcopy(second))
        x = torch.ones(2, 8)
        b(a(x)).sum().backward()
        second(first(x)).sum().backward()
        self.assertLess(distance(a.weight.grad, first.weight.grad), GRADIENTS)
        self.assertLess(distance(b[0].weight.grad, second[0].weight.grad), GRADIENTS)

    def test_unsupported_is_listed_at_once(self) -> None:
        class Odd(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.fft.fft(x).real + torch.linalg.det(x[:, :4])

        with self.assertRaises(dw.Error) as caught:
            dw.optimize(Odd())(torch.ones(4, 4))
        self.assertEqual(caught.exception.code, "DW2106")
        for word in ("fft", "det"):
            self.assertIn(word, str(caught.exception))

    def test_what_cannot_be_called(self) -> None:
        for module, argument, word in ((nn.Linear(4, 4, device="meta"), torch.ones(2, 4), "meta"),
                                       (nn.Linear(4, 4), torch.ones(2, 4, device="meta"), "meta"),
                                       (nn.Identity(), object(), "object")):
            with self.assertRaisesRegex(dw.Error, word):
                dw.optimize(module)(argument)

    def test_report(self) -> None:
        model = dw.optimize(make("nanogpt"), batch())
        text = str(model.report)
        for word in ("h.0.attn", "attention", "layer norm", "linear", "cross-entropy", "compiled programs"):
            self.assertIn(word, text)
        self.assertIn("<td>h.1.mlp.0</td>", model.report._repr_html_())


class Checked(unittest.TestCase):
    """Planted faults are found in their block."""

    def faulty(self, change: Any) -> Any:
        """Checks a module whose export was changed."""
        real = _runtime.export

        def export(module: nn.Module, *rest: Any) -> Any:
            other = copy.deepcopy(module)
            change(other)
            return real(other, *rest)

        with unittest.mock.patch.object(_runtime, "export", export):
            return dw.check(make("nanogpt"), batch())

    def test_agrees(self) -> None:
        for model in (make("nanogpt"), dw.optimize(make("tied")), llama()):
            found = dw.check(model, batch())
            self.assertTrue(found, str(found))
            self.assertIn("agrees", str(found))

    def test_chance_and_types(self) -> None:
        """A module with dropout cannot be compared; one that computes in bf16 inside has bf16's bounds."""
        with self.assertRaisesRegex(dw.Error, "at random"):
            dw.check(make("dropout"), batch())
        self.assertTrue(dw.check(make("dropout").eval(), batch()))
        found = dw.check(make("autocast"), batch())
        self.assertTrue(found, str(found))

    def test_another_operation(self) -> None:
        def change(m: Any) -> None:
            m.h[1].mlp[1] = nn.ReLU()

        self.assertEqual(self.faulty(change).block, "h.1.mlp.1")

    def test_another_constant(self) -> None:
        def change(m: Any) -> None:
            m.h[0].ln_2.eps = 1e-3

        self.assertEqual(self.faulty(change).block, "h.0.ln_2")

    def test_wrong_weight(self) -> None:
        model = dw.optimize(make("nanogpt"), batch())
        with unittest.mock.patch.object(_runtime.Store, "refresh", lambda self, child: True):
            w = model.h[0].attn.qkv.weight
            w.data = w.data * 1.01  # the engine goes on with the other
            self.assertEqual(dw.check(model, batch()).block, "h.0.attn.qkv")

    def test_wrong_gradient(self) -> None:
        class Cut(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> Any:
                return self.inner(x.detach())

        def change(m: Any) -> None:
            m.h[1].mlp[1] = Cut(m.h[1].mlp[1])

        self.assertEqual(self.faulty(change).block, "the gradient of h.1.mlp.0.weight")


class Compiled(unittest.TestCase):
    """torch.compile(backend="deepwell"), which Dynamo finds by the wheel's entry point."""

    def setUp(self) -> None:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        _backend._graphs.clear()

    def test_training_and_evaluation(self) -> None:
        eager = make("nanogpt")
        plain = copy.deepcopy(eager)
        model = torch.compile(plain, backend="deepwell")
        for rows in (2, 3):
            plain.zero_grad(), eager.zero_grad()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", UserWarning)
                have, want = model(**batch(rows)), eager(**batch(rows))
            self.assertLess(distance(have["logits"], want["logits"]), FORWARD)
            have["loss"].backward(), want["loss"].backward()
            for (name, p), q in zip(plain.named_parameters(), eager.parameters()):
                self.assertLess(distance(p.grad, q.grad), GRADIENTS, name)
        self.assertEqual([str(w.message) for w in said], [])
        found = dw.regions()
        self.assertEqual((len(found.graphs), found.recompiles, len(found.eager)), (2, 1, 0))
        self.assertIn("h.1.attn.qkv", str(found))
        model.eval(), eager.eval()
        with torch.no_grad():
            have, want = model(**batch()), eager(**batch())
        self.assertLess(distance(have["logits"], want["logits"]), FORWARD)
        self.assertFalse(have["loss"].requires_grad)

    def test_what_stays_eager(self) -> None:
        """A graph break, and an operator that is not supported, leave their part eager and are said."""
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.a(x)
                torch._dynamo.graph_break()
                return torch.fft.fft(self.b(x)).real

        plain = Odd()
        x = torch.ones(2, 4)
        with self.assertWarnsRegex(UserWarning, r"stays eager(.|\n)*aten.fft_fft") as said:
            have = torch.compile(plain, backend="deepwell")(x)
        self.assertEqual(said.filename, __file__)
        self.assertLess(distance(have, plain(x)), FORWARD)
        found = dw.regions()
        self.assertEqual((len(found.graphs), len(found.eager), sum(found.breaks.values())), (2, 1, 1))
        for word in ("aten.fft_fft", "graph break, 1 times", "test_optimize.py:"):
            self.assertIn(word, str(found))

    def test_another_device_stays_eager(self) -> None:
        for parameters, argument in (("meta", "meta"), ("cpu", "meta")):
            torch.compiler.reset()
            plain = nn.Sequential(nn.Linear(4, 4, device=parameters).requires_grad_(False))
            plain.forward = lambda x, plain=plain: plain[0].weight.to(x.device) @ x
            with self.assertWarnsRegex(UserWarning, "stays eager.*is on meta"):
                have = torch.compile(plain, backend="deepwell")(torch.ones(4, 2, device=argument))
            self.assertEqual(have.device.type, "meta")

    def test_graphs_share_parameters(self) -> None:
        """Graphs of one module read its parameters in one place."""
        plain = make("nanogpt")
        model = torch.compile(plain, backend="deepwell")
        model(**batch())
        where = plain.wte.weight.data_ptr()
        with torch.no_grad():
            model(**batch())
            model(**batch(4, 5))
        self.assertEqual(plain.wte.weight.data_ptr(), where)


if __name__ == "__main__":
    unittest.main()
