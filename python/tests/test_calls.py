"""The calls, against the real program."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib

import pytest

import deepwell as dw
from deepwell import _calls, _program

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plan() -> dw.Plan:
    return dw.autoplan("qwen3-0.6b", hw="8xb200", seq_len=4096, global_batch=256, precision="mxfp8",
                       top=2)


def test_probe() -> None:
    here = dw.probe()
    assert here.cores > 0 and here.memory_bytes > 0 and "cpu" in here.engines
    assert str(here).startswith("host ") and str(here) in here._repr_html_().replace("&#x27;", "'")


@pytest.mark.parametrize(("file", "cluster", "variant"), [
    ("dgx-b200", "8xb200", "sm_100"), ("rtx", None, "sm_120"), ("nogpu", None, None)])
def test_machines(file: str, cluster: str | None, variant: str | None) -> None:
    data = json.loads((ROOT / f"machine/testdata/{file}.json").read_text())
    m = _calls._machine(_program.Said("", data, None))
    assert [g.blackwell_variant for g in m.gpus[:1]] == ([variant] if variant else [])
    assert all(g.is_blackwell and g.supports_mxfp8 and g.supports_fp4 for g in m.gpus)
    if cluster:
        assert m.cluster == cluster
    if not m.gpus:
        with pytest.raises(dw.Error, match="no GPUs"):
            dw.autoplan("qwen3-0.6b", hw=m)


def test_capture() -> None:
    m = dw.capture("qwen3-0.6b")
    assert (m.family, m.layers, m.parameters) == ("qwen3", 28, 596_049_920)
    folder = dw.capture(ROOT / "examples/first-run")
    assert folder.layers == 6 and pathlib.Path(folder.source).is_absolute()
    with pytest.raises(TypeError, match="not a dict"):
        dw.capture({})


def test_results_are_frozen(plan: dw.Plan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.model = "another"  # type: ignore[misc]
    assert isinstance(hash(plan), int)


def test_plan(plan: dw.Plan, tmp_path: pathlib.Path) -> None:
    assert plan.cluster == "8xb200" and len(plan.choices) == 2
    assert plan.best.step_interval[0] < plan.best.step_seconds < plan.best.step_interval[1]
    assert plan.best.step_seconds <= plan.choices[1].step_seconds
    plan.save(tmp_path / "plan.json")
    saved, kept = dw.dryrun(tmp_path / "plan.json"), dw.dryrun(plan)
    assert saved.text == kept.text and saved.step_seconds == plan.best.step_seconds
    assert dw.dryrun(plan.choices[1]).step_seconds == plan.choices[1].step_seconds


def test_dryrun_has_the_speedup_against_bf16(plan: dw.Plan) -> None:
    d, bf16 = dw.dryrun(plan), dw.dryrun(plan, precision="bf16")
    assert d.expected_speedup == bf16.step_seconds / d.step_seconds > 1
    assert d.speedup_interval[0] < d.expected_speedup < d.speedup_interval[1]
    assert d["expected_speedup"] == d.expected_speedup and d["memory_gb"] == d.peak_bytes / 1e9
    assert bf16.expected_speedup == 1 and bf16.speedup_interval == (1, 1)
    with pytest.raises(KeyError):
        d["_repr_html_"]


def test_precision_policy() -> None:
    plain = dw.PrecisionPolicy("mxfp8").resolve("qwen3-0.6b")
    policy = dw.PrecisionPolicy(default_compute=dw.Precision.MXFP8,
                                sensitive_layers=("embedding", "final_linear", 0, "down"))
    rules = policy.resolve("qwen3-0.6b")
    assert 0 < rules.share["mxfp8"] < plain.share["mxfp8"]
    fast, slow = (dw.autoplan("qwen3-0.6b", hw="8xb200", seq_len=4096, global_batch=256, top=1,
                              precision=p) for p in ("mxfp8", policy))
    assert slow.best.step_seconds > fast.best.step_seconds
    assert dw.dryrun(slow).step_seconds == slow.best.step_seconds  # the policy goes with the plan
    with pytest.raises(dw.Error, match="no-such-layer") as failed:
        dw.PrecisionPolicy("mxfp8", ("no-such-layer",)).resolve("qwen3-0.6b")
    assert "/" not in failed.value.where  # no folder that is gone


def test_errors() -> None:
    with pytest.raises(dw.Error) as failed:
        dw.autoplan("qwen3-0.6b", hw="b200x8")
    e = failed.value
    assert (e.code, e.exit) == ("DW2402", 2) and e.fix and str(e).startswith("DW2402 ")
    with pytest.raises(dw.Error) as failed:
        dw.capture("no-such-model")
    assert failed.value.code == "DW2701"


def test_what_does_not_fit_has_a_result(plan: dw.Plan) -> None:
    large = dict(json.loads(plan.best.plan), model="llama3.1-405b", seq=8192)
    choice = dataclasses.replace(plan.best, plan=json.dumps(large))
    with pytest.raises(dw.Error) as failed:
        dw.dryrun(choice)
    result = failed.value.result
    assert failed.value.exit == 3 and isinstance(result, dw.DryRun) and not result.fits


def test_compile() -> None:
    progress = io.StringIO()
    with contextlib.redirect_stderr(progress):  # as in a notebook
        engine = dw.compile(ROOT / "examples/fsdp.mlir", hw="8xb200")
    assert engine.fits and engine.devices == 8 and engine.capacity_bytes > engine.memory_bytes > 0
    assert "compiled, not run" in str(engine)
    with pytest.raises(TypeError, match="without a plan"):
        dw.dryrun(engine)


def test_compile_of_a_plan() -> None:
    model = dw.capture(ROOT / "examples/first-run")
    plan = dw.autoplan(model, hw="8xb200", seq_len=512, global_batch=64, top=1)
    engine = dw.compile(model, plan=plan)
    assert "collectives match the plan" in str(engine) and engine.fits
    d = dw.dryrun(engine)
    assert d.step_seconds == plan.best.step_seconds and d.expected_speedup == 1
    assert abs(d.peak_bytes / engine.memory_bytes - 1) < 0.1  # predicted, and the compiler's


def test_compile_checks_its_arguments(plan: dw.Plan) -> None:
    with pytest.raises(ValueError, match="the plan is for qwen3-0.6b"):
        dw.compile("llama3.1-8b", plan=plan)
    with pytest.raises(ValueError, match="safe"):
        dw.compile(plan=plan, fallback="none")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a model or a plan"):
        dw.compile()
