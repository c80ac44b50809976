"""follow, with the real client libraries; nothing leaves the machine."""

from __future__ import annotations

import json
import pathlib

import pytest

import deepwell as dw
from test_children import wait_for


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of a run of three steps, the last of which was made twice."""
    folder = tmp_path / "run"
    folder.mkdir()
    step = dict(v=1, t="2026-01-01T00:00:00Z", kind="step", steps=3, rate=1e-3, tokens=64,
                tokens_per_second=100.0, seconds=0.5, grad_norm=1.5)
    lines = [dict(step, step=1, loss=4.0), dict(step, step=2, loss=3.0), dict(step, step=3, loss="NaN"),
             dict(v=1, t="2026-01-01T00:00:00Z", kind="resumed", step=2, path="checkpoints"),
             dict(step, step=3, loss=2.0),
             dict(v=1, t="2026-01-01T00:00:00Z", kind="eval", step=3, tokens=9, loss=2.5)]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    (folder / "run.toml").write_text("steps = 3\n[optimizer]\nlr = 1e-3\n")
    return folder


def test_mlflow(run: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert dw.follow(run, to="mlflow", project="tests", name="three steps") == 4
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])[0]
    assert found.info.run_name == "three steps" and found.info.status == "FINISHED"
    assert found.data.params == {"steps": "3", "optimizer.lr": "0.001"}
    assert found.data.metrics["eval/loss"] == 2.5
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history if m.value == m.value] == [(1, 4.0), (2, 3.0), (3, 2.0)]


def test_wandb(run: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert dw.follow(run, to="wandb", project="tests", name="three steps") == 4
    written = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(written) == 1
    names = (b"train/loss", b"train/lr", b"eval/loss", b"three steps", b"optimizer.lr")
    # The library's own process writes the file, on a busy machine a little after finish().
    wait_for("the metrics", lambda: all(name in written[0].read_bytes() for name in names))
