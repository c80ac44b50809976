"""Events of a run, read as it writes them and forwarded to an experiment tracker."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pathlib
import time
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from ._program import Error

Event = dict[str, Any]

POLL = 0.2  # seconds between looks at a file that grows
METRICS = ("loss", "grad_norm", "rate", "tokens", "tokens_per_second", "seconds", "memory_bytes", "mfu")


def follow(run: str | os.PathLike[str], to: Literal["wandb", "mlflow"] | None = None, *,
           project: str = "deepwell", name: str | None = None, wait: bool = True) -> int:
    """Forwards the events of a run to Weights & Biases or MLflow, and gives the number of steps.

    run is the folder of a run. to may be left out if one of the two libraries is installed. While
    the run is on, follow goes along until it ends; wait=False forwards what is there and returns.
    The recipe becomes the configuration, and each step's loss, gradient norm, learning rate and
    speed, and validation losses, become metrics of their step; of steps that a resumed run makes
    again, the later ones come last. The client library is yours to install and to log in with.
    """
    folder = pathlib.Path(run)
    if not folder.is_dir():
        raise Error("", "there is no run to follow", where=str(folder), fix="the folder of a run: out")
    if to is None:
        installed = [t for t in TARGETS if importlib.util.find_spec(t) is not None]
        if len(installed) != 1:
            raise Error("", "follow needs to know where events go: " + (" and ".join(installed) + " are installed"
                        if installed else f"neither of {', '.join(TARGETS)} is installed"),
                        fix='to="wandb" or to="mlflow"', exit=2)
    where = installed[0] if to is None else to
    if where not in TARGETS:
        raise ValueError(f"to is one of {', '.join(TARGETS)}, not {to!r}")
    target = TARGETS[where](project, name or folder.resolve().name, _recipe(folder))
    steps, failed = 0, True
    try:
        for event in events(folder, wait):
            at = int(event.get("step", 0))
            if event["kind"] == "step":
                target.log(_metrics("train/", {k: event[k] for k in METRICS if k in event}), at)
                steps += 1
            elif event["kind"] == "eval":
                target.log(_metrics("eval/", {"loss": event["loss"], "tokens": event["tokens"]}), at)
            elif event["kind"] == "rejected":
                target.log({"train/rejected": 1.0}, at)
        failed = False
    finally:
        target.close(failed)
    return steps


def _metrics(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    names = {"rate": "lr"}
    return {prefix + names.get(k, k): float(v) for k, v in values.items()}


def _recipe(folder: pathlib.Path) -> dict[str, Any]:
    """Gives the recipe of a run, flat, if fit has left it there."""
    try:
        tables = tomllib.loads((folder / "run.toml").read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return {}
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key] = value
    return flat


def events(folder: pathlib.Path, wait: bool) -> Iterator[Event]:
    """Gives the events of a run; with wait, as long as a process has the lock of its folder."""
    path, rest, position = folder / "events.jsonl", b"", 0
    while True:
        running = wait and _running(folder)  # before the read: what it wrote last is seen
        try:
            with open(path, "rb") as f:
                f.seek(position)
                data = f.read()
        except FileNotFoundError:
            data = b""
        position += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield _event(line)
        if not running:
            return
        if not data:
            time.sleep(POLL)


def _event(line: bytes) -> Event:
    record = json.loads(line)
    if not isinstance(record, dict) or "kind" not in record:
        raise Error("", "the file of events has a line that is no event", where=line[:80].decode("utf-8", "replace"))
    return record


def _running(folder: pathlib.Path) -> bool:
    """Says whether a run has locked its folder, as the program does (Go: internal/flock).

    Who locks it writes the number of his process into the file. The lock is only tried while there is
    that process, so that no run finds it taken as it starts.
    """
    try:
        with open(folder / ".lock", "rb") as f:
            os.kill(int(f.read(64).split()[0]), 0)
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # another user's process is there, too
        return True
    except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):
        return False
    return False


def curve(path: str) -> list[Event]:
    """Gives each step of a run once: where it was resumed, what the resumed run did."""
    steps: list[Event] = []
    try:
        lines = pathlib.Path(path).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return steps
    for event in map(_event, lines):
        if event["kind"] == "resumed":
            steps = [s for s in steps if s["step"] <= event["step"]]
        elif event["kind"] == "step":
            if steps and steps[-1]["step"] >= event["step"]:
                steps = [s for s in steps if s["step"] < event["step"]]
            steps.append(event)
    return steps


class Target(Protocol):
    """Where metrics go."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self, failed: bool) -> None: ...


class WandB:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        wandb = _client("wandb", "wandb")
        self.run = wandb.init(project=project, name=name, config=dict(config))
        # Steps may come twice, and validation losses after their step.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log({**metrics, "step": step})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        mlflow = _client("mlflow", "mlflow-skinny")
        self.client = mlflow.MlflowClient()
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        self.entities = mlflow.entities
        self.id = self.client.create_run(experiment, run_name=name).info.run_id
        self.client.log_batch(self.id, params=[self.entities.Param(k, str(v)[:500])
                                               for k, v in config.items()])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.id, metrics=[self.entities.Metric(k, v, now, step)
                                                for k, v in metrics.items()])

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


TARGETS: Mapping[str, type[Target]] = {"wandb": WandB, "mlflow": MLflow}


def _client(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise Error("", f"follow needs the client library of {module}", fix=f"pip install {package}") from e
