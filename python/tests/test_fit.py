"""Trainer with modules of torch and transformers, against eager PyTorch."""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import deepwell as dw
from deepwell import _batches, _module, _optimizer

torch.set_num_threads(2)


class Tiny(nn.Module):
    """A decoder of one layer; what it gives differs: logits, or a pair with the loss."""

    def __init__(self, paired: bool) -> None:
        super().__init__()
        self.paired = paired
        self.wte, self.wpe = nn.Embedding(40, 16), nn.Embedding(32, 16)
        # A bias of keys has the gradient 0: AdamW would make a step of the noise in its place.
        self.qkv = nn.Linear(16, 48, bias=False)
        self.ln, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def logits(self, idx: Any) -> Any:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(self.ln(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class Logits(Tiny):
    def forward(self, x: Any) -> Any:
        return self.logits(x)


class Paired(Tiny):
    def forward(self, idx: Any, targets: Any = None) -> Any:
        logits = self.logits(idx)
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(width: int = 32, ffn: int = 48) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=width, intermediate_size=ffn, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def adamw(module: Any) -> Any:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                              {"params": vectors, "weight_decay": 0.0}], lr=1e-3)


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


CASES: dict[str, tuple[Any, Any, Any]] = {  # the module, a batch of ids and labels, and its loss
    "transformers": (llama, lambda x, y: {"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)},
                     lambda m, b: m(**b).loss),
    "a pair": (lambda: Paired(True), lambda x, y: (x, y), lambda m, b: m(*b)[1]),
    "logits": (lambda: Logits(False), lambda x, y: [x, y],
               lambda m, b: nn.functional.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())),
}


@pytest.mark.parametrize("case", CASES)
def test_fit_is_the_users_loop(case: str, tmp_path: pathlib.Path) -> None:
    """Losses and weights are PyTorch's, and the module is as it was but for its weights."""
    make, form, loss = CASES[case]
    made = sgd if case == "a pair" else adamw
    torch.manual_seed(0)
    module = make()
    module.eval()
    ids = [torch.randint(0, 40, (4, 13)) for _ in range(8)]
    batches = [form(x[:, :-1], x[:, 1:]) for x in ids]
    eager = copy.deepcopy(module).train()
    optimizer, losses = made(eager), []
    for batch in batches:
        value = loss(eager, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    own, forward = dict(module.named_parameters()), module.forward
    done = dw.Trainer.from_engine(module, optimizer=made(module), dataloader=batches,
                                  run=tmp_path / "run").fit()
    assert done.losses == pytest.approx(losses, rel=1e-5)
    for (name, p), q in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert p is own[name] and torch.allclose(p, q, atol=2e-5), name
    assert module.forward == forward and not module.training
    if case == "transformers":
        assert module.lm_head.weight is module.model.embed_tokens.weight
        assert module.config._attn_implementation == "sdpa"
        prompt = torch.tensor([[1, 2, 3]])
        said = [m.eval().generate(prompt, max_new_tokens=8, do_sample=False) for m in (module, eager)]
        assert torch.equal(*said)
        again = dw.Trainer.from_engine(module, optimizer=adamw(module), dataloader=batches + batches[:2],
                                       run=tmp_path / "run").fit()  # the run goes on
        assert again.losses[:8] == done.losses and again.step == 10
    else:
        assert module.head.weight is module.wte.weight


def test_optimizers() -> None:
    module = Logits(False)
    names = {id(p): n for n, p in module.named_parameters()}

    def keys(o: Any, scheduler: Any = None) -> Any:
        return _optimizer.keys(o, scheduler, 100, names)

    assert keys(adamw(module)) == {"name": "adamw", "lr": [1e-3, 1e-3], "schedule": "constant", "warmup": 0,
                                   "weight_decay": 0.1, "betas": [0.9, 0.999], "max_grad_norm": 0.0}
    with pytest.warns(UserWarning, match="norms and biases"):
        assert keys(torch.optim.AdamW(module.parameters()))["weight_decay"] == 0.01
    assert keys(torch.optim.Adam(module.parameters()))["weight_decay"] == 0
    assert keys(torch.optim.SGD(module.parameters(), lr=0.1)) == {
        "name": "sgd", "lr": [0.1, 0.1], "schedule": "constant", "warmup": 0, "weight_decay": 0.0,
        "max_grad_norm": 0.0}
    cosine = adamw(module)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(cosine, T_max=100, eta_min=1e-5)
    assert keys(cosine, schedule)["lr"] == [1e-3, 1e-5] and keys(cosine, schedule)["schedule"] == "cosine"
    p = list(module.parameters())
    stepped = adamw(module)
    module(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    stepped.step()
    linear = adamw(module)
    for o, scheduler, message in [
            (torch.optim.RMSprop(p), None, "no RMSprop"),
            (torch.optim.SGD(p, momentum=0.9), None, "momentum=0.9"), (torch.optim.AdamW(p, amsgrad=True), None, "amsgrad=True"),
            (torch.optim.AdamW(p, eps=1e-6), None, "eps=1e-06"),
            (torch.optim.AdamW(p[:2]), None, "lacks 5 parameters of the module: qkv.weight"),
            (torch.optim.AdamW([{"params": p[:1], "lr": 1.0}, {"params": p[1:]}]), None, "lr="),
            (torch.optim.AdamW([{"params": p[:1], "weight_decay": 0.3}, {"params": p[1:]}]), None,
             "a weight_decay of"), (stepped, None, "made steps already"),
            (torch.optim.Adam(p, weight_decay=0.1), None, "part of its gradient"),
            (torch.optim.AdamW(nn.Linear(2, 2).parameters()), None, "not the module's"),
            (cosine, None, "has a scheduler"),
            (linear, torch.optim.lr_scheduler.LinearLR(linear), "no LinearLR")]:
        with pytest.raises(dw.Error, match=message):
            keys(o, scheduler)
    with pytest.raises(dw.Error, match="T_max=100"):
        _optimizer.keys(cosine, schedule, 50, names)


def test_arrays_of_torch() -> None:
    rows = torch.tensor([[1, 2], [-100, 4]])
    want = bytes(_batches.ints("x", rows.tolist()).data)
    for kind in (torch.int64, torch.int32, torch.int16):
        for array in (rows.to(kind), rows.to(kind).T.contiguous().T, rows.to(kind).numpy()):
            assert bytes(_batches.ints("x", array).data) == want
    for wrong in (2**32 + 1, -2**33):
        with pytest.raises(IndexError, match=f"x has the number {wrong}"):
            _batches.ints("x", torch.tensor([[1, wrong]]))
    with pytest.raises(dw.Error, match="float32.*not integers"):
        _batches.ints("x", rows.float())
    images, classes = torch.zeros(4, 3, 8, 8), torch.arange(4)
    for batch, message in [((images, classes), r"float32 and the shape \[4, 3, 8, 8\].*trains on tokens"),
                           (([[0.5]], [[1]]), "elements of type float"), (images[0, 0, 0], "float32"), (7, "int that")]:
        with pytest.raises(dw.Error, match=message):
            _batches.ints("input_ids", _batches.arrays(batch)["input_ids"])
    encoding = transformers.BatchEncoding({"input_ids": rows, "labels": rows})
    assert set(_batches.arrays(encoding)) == {"input_ids", "labels"}


def test_what_cannot_be_trained(tmp_path: pathlib.Path) -> None:
    module = Logits(False)
    ids = torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="learn to repeat"):
        dw.Trainer.from_engine(module, optimizer=adamw(module), run=tmp_path / "run",
                               dataloader=[{"input_ids": ids, "labels": ids}]).fit()
    assert not (tmp_path / "run").exists()
    module.wpe.weight.requires_grad_(False)
    with pytest.raises(dw.Error, match="frozen.*wpe.weight"):
        _module.save(module, str(tmp_path / "a.pt2"), 8)

    class Sum(nn.Linear):
        def forward(self, x: Any) -> Any:
            return "no tensor"

    with pytest.raises(dw.Error, match="neither a loss nor logits"):
        _module.save(Sum(2, 2), str(tmp_path / "a.pt2"), 8)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.body, self.head = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 9)

        def forward(self, x: Any) -> Any:
            return self.head(self.body(self.wte(x))[0])

    with pytest.raises(dw.Error, match="aten.lstm"):
        _module.save(Recurrent(), str(tmp_path / "a.pt2"), 8)


def test_the_modules_own_names(tmp_path: pathlib.Path) -> None:
    """Mappings may have the names of the module's forward; warnings are of the caller's line."""
    module = Paired(True)
    x = torch.arange(16).view(2, 8)
    losses: list[object] = []
    for batch in ((x, x + 1), {"idx": x, "targets": x + 1}):
        trainer = dw.Trainer.from_engine(copy.deepcopy(module), optimizer={"name": "sgd", "lr": 0.1},
                                         dataloader=[batch], precision="f32", run=tmp_path / str(len(losses)))
        assert "Paired" in repr(trainer) and "list" in repr(trainer)
        losses.append(trainer.fit(2).losses)
    assert losses[0] == losses[1]
    with pytest.warns(UserWarning, match="norms and biases") as said, pytest.raises(dw.Error, match="T_max"):
        optimizer = torch.optim.AdamW(module.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        dw.Trainer.from_engine(module, optimizer=optimizer, scheduler=schedule, dataloader=[x],
                               run=tmp_path / "c").fit(2)
    assert said[0].filename == __file__ and not (tmp_path / "c").exists()


def test_from_capture_to_weights(tmp_path: pathlib.Path) -> None:
    """capture, autoplan, compile and dryrun of a module, and fit under a plan for two devices."""
    module = llama(64, 128)  # whole blocks of MXFP8
    model = dw.capture(module, seq_len=32)
    assert model.layers == 2 and model.module is module
    assert model.parameters == sum(p.numel() for p in module.parameters())
    engine = dw.optimize_for_blackwell(module, precision="mxfp8", seq_len=32, batch_size=4)
    assert engine.fits and engine.module is module and dw.dryrun(engine)["memory_gb"] > 0
    before = module.lm_head.weight.detach().clone()
    ids = torch.randint(0, 40, (4, 32))
    losses = []
    for fix in ("dp", "tp"):
        plan = tmp_path / f"{fix}.json"
        plan.write_text(json.dumps({"cluster": "2xcpu", "seq": 32, "batch": 4, fix: 2}))
        torch.manual_seed(0)
        twin = copy.deepcopy(module)
        trainer = dw.Trainer.from_engine(twin, optimizer=adamw(twin), dataloader=[ids] * 6, plan=plan,
                                         precision="f32", run=tmp_path / fix)
        losses.append(trainer.fit().losses)
        assert not torch.equal(twin.lm_head.weight, before)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    low = dw.Trainer.from_engine(engine, dataloader=[ids] * 3, optimizer=adamw(module),
                                 run=tmp_path / "engine").fit()  # the engine has plan and precision
    assert low.losses[0] == pytest.approx(losses[0][0], rel=0.01)
    assert not torch.equal(module.lm_head.weight, before)


def test_capture_of_learned_positions() -> None:
    module = Logits(False)
    assert dw.capture(module).parameters == sum(p.numel() for p in module.parameters())
    assert dw.capture(module, seq_len=16).context == 16
