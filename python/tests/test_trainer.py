"""Trainer and follow, against the real program and without torch."""

from __future__ import annotations

import array
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import deepwell as dw
from deepwell import _batches, _follow, _optimizer
from test_children import alive, descendants, wait_for

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=64, hidden_size=32,
              intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu")
ADAM = {"name": "adamw", "lr": 1e-2, "warmup": 0}


@pytest.fixture
def model(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


class Loader:
    """Batches that depend on their number only. It fails, or waits, at one of them."""

    def __init__(self, count: int, fail: int = -1, tokens: int = 16) -> None:
        self.count, self.fail, self.tokens = count, fail, tokens

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for n in range(self.count):
            if n == self.fail:
                raise OSError("shard 7 is gone")
            rows = [[random.Random(f"{n}.{i}").randrange(64) for _ in range(self.tokens)]
                    for i in range(4)]
            yield {"input_ids": rows, "labels": rows}


def fit(model: str, loader: Any, run: pathlib.Path, steps: int | None = None, **more: Any) -> dw.Fitted:
    trainer = dw.Trainer.from_engine(model, optimizer=ADAM, dataloader=loader, run=run,
                                     precision="f32", **more)
    return trainer.fit(steps)


def test_a_run(model: str, tmp_path: pathlib.Path) -> None:
    done = fit(model, Loader(6), tmp_path / "a")
    assert (done.step, done.steps, len(done.losses)) == (6, 6, 6) and done.run == str(tmp_path / "a")
    assert str(done).startswith("step 6 of 6, loss 4.")
    folder = dw.export(done.run, tmp_path / "out")
    assert folder.parameters == 22_688
    # The same data as pairs of ids and the tokens to predict, without a length, and twice through it.
    shifted = [([r[:] for r in b["input_ids"]], [r[1:] + [-100] for r in b["labels"]])
               for b in Loader(6)]
    pairs = fit(model, iter(shifted), tmp_path / "b", 6)
    assert pairs.losses == done.losses
    twice = fit(model, shifted[:3], tmp_path / "c", 6)
    assert twice.losses[:3] == done.losses[:3] and twice.step == 6
    ids = fit(model, [b["input_ids"] for b in Loader(6)], tmp_path / "d")
    assert ids.losses == done.losses
    with pytest.raises(TypeError, match="the number of steps"):
        fit(model, iter(shifted), tmp_path / "e")


def test_precision_and_plan(model: str, tmp_path: pathlib.Path) -> None:
    want = fit(model, Loader(3, tokens=32), tmp_path / "f32").losses
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"cluster": "2xcpu", "seq": 32, "batch": 4, "fsdp": 2}))
    assert fit(model, Loader(3, tokens=32), tmp_path / "plan", plan=plan).losses == pytest.approx(want, rel=1e-5)
    low = dw.Trainer.from_engine(dw.capture(model), optimizer=ADAM, dataloader=Loader(3, tokens=32),
                                 precision=dw.PrecisionPolicy("mxfp8", ("down",)), run=tmp_path / "low").fit()
    assert low.losses == pytest.approx(want, rel=0.02) and low.losses != want
    assert (tmp_path / "low/precision.json").exists()


def test_the_end_of_the_data_ends_a_run(model: str, tmp_path: pathlib.Path) -> None:
    with pytest.warns(UserWarning, match="ended after step 3 of 6"):
        done = fit(model, iter(Loader(3)), tmp_path / "a", 6)
    assert (done.step, done.steps) == (3, 6)


def test_what_the_loader_raises_stops_the_run(model: str, tmp_path: pathlib.Path) -> None:
    whole = fit(model, Loader(6), tmp_path / "whole")
    with pytest.raises(OSError, match="shard 7") as failed:
        fit(model, Loader(6, fail=4), tmp_path / "a")
    assert "stopped after step 4 of 6, saved" in failed.value.__notes__[0]
    resumed = fit(model, Loader(6), tmp_path / "a")
    assert resumed.losses == whole.losses


def test_batches_are_checked(model: str, tmp_path: pathlib.Path) -> None:
    rows = [[1, 2, 3, 4]] * 2
    for batch, message in [
            ({"input_ids": rows, "pixel_values": rows}, "pixel_values, which training does not take"),
            ({"labels": rows}, "no input_ids"), ({"input_ids": [[1, 2], [3]]}, "different lengths"),
            ({"input_ids": []}, "shape")]:
        with pytest.raises(ValueError, match=message):
            fit(model, [batch], tmp_path / "a")
    with pytest.raises(ValueError, match="drop_last=True"):
        fit(model, [rows, rows[:1]], tmp_path / "b")
    with pytest.raises(dw.Error, match="model has 64") as failed:
        fit(model, [[[1, 2, 64, 3]] * 2], tmp_path / "c")
    assert isinstance(failed.value.result, dw.Fitted) and failed.value.result.step == 0
    with pytest.raises(dw.Error, match="padding before"):
        fit(model, [{"input_ids": rows, "attention_mask": [[0, 1, 1, 1]] * 2}], tmp_path / "d")
    with pytest.raises(ValueError, match="has no batch"):
        fit(model, [], tmp_path / "e")


def test_what_is_refused(model: str) -> None:
    for elastic in (True, 2, "auto"):
        with pytest.raises(dw.Error, match="elastic="):
            dw.Trainer.from_engine(model, dataloader=[], elastic=elastic)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a dict"):
        dw.Trainer.from_engine({}, dataloader=[])
    with pytest.raises(dw.Error, match="no optimizer 'lion'"):
        _optimizer.keys("lion", None, 1, {})
    assert _optimizer.keys("adamw_dw", None, 1, {}) == {"name": "adamw"}


SCRIPT = textwrap.dedent("""
    import signal, sys, time
    sys.path[:0] = {path!r}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored in a background job
    import deepwell as dw
    from test_trainer import ADAM, Loader

    class Slow(Loader):
        def __iter__(self):
            for n, batch in enumerate(super().__iter__()):
                if n == 3:
                    print("waiting", flush=True)
                    time.sleep(600)
                yield batch

    dw.Trainer.from_engine({model!r}, optimizer=ADAM, dataloader=Slow(6), run={run!r},
                           precision="f32").fit()
""")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_is_saved(how: signal.Signals, model: str, tmp_path: pathlib.Path) -> None:
    """By Ctrl-C or by the end of Python, while the loader is slow; nothing is left behind."""
    run = tmp_path / "a"
    script = SCRIPT.format(path=[str(pathlib.Path(__file__).parent)], model=model, run=str(run))
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert caller.stdout is not None and caller.stdout.readline() == "waiting\n"
        wait_for("three steps", lambda: len(_follow.curve(str(run / "events.jsonl"))) == 3)
        children = descendants(caller.pid)
        assert children
        os.kill(caller.pid, how)
        caller.communicate(timeout=60)
        wait_for("the end of all children", lambda: not any(map(alive, children)))
    finally:
        caller.kill()
    resumed = fit(model, Loader(6), run)
    assert resumed.losses == fit(model, Loader(6), tmp_path / "whole").losses
    events = list(_follow.events(run, wait=False))
    assert [e["step"] for e in events if e["kind"] == "resumed"] == [3]


def test_integers() -> None:
    want = array.array("i", [1, 2, -100, 4]).tobytes()
    assert bytes(_batches.ints("x", [[1, 2], [-100, 4]]).data) == want
    with pytest.raises(IndexError, match="x has a number of more than 32 bits"):
        _batches.ints("x", [[1, 2**32]])
    long = "é" * 20_000
    text = _batches.error(ValueError(long))
    assert len(text) <= 8 + _batches.TEXT and text[8:].decode().startswith("ValueError: é")


class Recorded:
    """Where follow forwards to, in place of a client library."""

    def __init__(self, project: str, name: str, config: Any) -> None:
        self.about = (project, name, config)
        self.logged: list[tuple[dict[str, float], int]] = []
        self.closed: bool | None = None
        made.append(self)

    def log(self, metrics: Any, step: int) -> None:
        self.logged.append((dict(metrics), step))

    def close(self, failed: bool) -> None:
        self.closed = failed


made: list[Recorded] = []


def test_follow(model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run goes on and after it. The real clients are in test_trackers.py."""
    monkeypatch.setattr(_follow, "TARGETS", {"wandb": Recorded})
    run = tmp_path / "a"
    run.mkdir()
    counted: list[int] = []

    class Watched(Loader):
        def __iter__(self) -> Iterator[Any]:
            for n, batch in enumerate(super().__iter__()):
                if n == 4:  # the run is on
                    wait_for("a step", lambda: _follow.curve(str(run / "events.jsonl")))
                    watcher.start()
                yield batch

    watcher = threading.Thread(target=lambda: counted.append(dw.follow(run, to="wandb")))
    done = fit(model, Watched(6), run)
    watcher.join(60)
    assert counted == [6] and dw.follow(run, "wandb", project="p", name="n") == 6
    for one in made:
        losses = [m["train/loss"] for m, _ in one.logged if "train/loss" in m]
        assert tuple(losses) == done.losses and one.closed is False
        assert [s for _, s in one.logged] == list(range(1, 7))
    assert made[0].about[1] == "a" and made[1].about[:2] == ("p", "n")
    assert made[0].about[2]["optimizer.lr"] == 0.01
    with pytest.raises(dw.Error, match="no run"):
        dw.follow(tmp_path / "nothing")
    with pytest.raises(ValueError, match="not 'x'"):
        dw.follow(run, to="x")  # type: ignore[arg-type]
    monkeypatch.setattr(_follow, "TARGETS", {"no_such": Recorded, "nor_this": Recorded})
    with pytest.raises(dw.Error, match="neither of no_such, nor_this is installed"):
        dw.follow(run)
