"""The whole loop of training in the engine: batches go in, trained weights come back."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import pathlib
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import _batches, _optimizer
from ._calls import Path, _model_of, _plan, _planned, _precision, is_module
from ._follow import curve
from ._program import Error, Said, run as _run
from ._results import Choice, Engine, Model, Plan, PrecisionPolicy, Result, source_of


PROGRAM = "program.pt2"  # of the module, in the run's folder


@dataclass(frozen=True, kw_only=True)
class Fitted(Result):
    """A run that fit has made."""

    run: str  # its folder, that follow, export and the commands take
    step: int  # the last one
    steps: int  # of the whole run
    losses: tuple[float, ...] = field(repr=False)  # of the steps, from the first on
    eval_loss: float | None
    seconds: float  # of this call, compiling and saving included
    step_seconds: float  # the median
    tokens_per_second: float
    feed_seconds: float  # in which Python made bytes of a batch, in the mean


class Trainer:
    """A model, an optimizer and a data loader; fit trains the model in the engine.

    A batch is a mapping with input_ids, or the name that the module's forward has for them, and
    labels, position_ids and attention_mask if it likes; a pair (ids, labels); or ids. Arrays are
    torch's, numpy's or lists, [sequences, tokens], of one size in all batches. Labels are as the
    module takes them: transformers moves labels by a token itself. Without a module, a mapping has
    them as transformers, and a pair as the tokens to predict. Negative labels are not learned;
    without labels each is the next token.
    """

    def __init__(self, source: str, module: Any, *, optimizer: Any, scheduler: Any,
                 dataloader: Iterable[Any], plan: Plan | Choice | Path | None,
                 precision: str | PrecisionPolicy | None, run: Path | None,
                 device: Literal["cpu", "gpu"], settings: Mapping[str, object]) -> None:
        self._source = source
        self._module = module
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._dataloader = dataloader
        self._plan = plan
        self._precision = precision
        self._run = None if run is None else os.path.abspath(run)
        self._device = device
        self._settings = dict(settings)

    @classmethod
    def from_engine(cls, engine: Any, *, optimizer: Any = "adamw", dataloader: Iterable[Any],
                    elastic: bool = False, scheduler: Any = None,
                    plan: Plan | Choice | Path | None = None,
                    precision: str | PrecisionPolicy | None = None, run: Path | None = None,
                    device: Literal["cpu", "gpu"] = "cpu",
                    settings: Mapping[str, object] | None = None) -> Trainer:
        """Takes a torch module, or what capture or compile gave.

        optimizer is torch's AdamW over the module's parameters, or a name, or a dict of keys of
        run.toml's section [optimizer]. scheduler is torch's CosineAnnealingLR over the whole run.
        run is the folder of the run, which is resumed if it has checkpoints; without one each fit
        makes a new folder below runs. settings are other keys of run.toml, such as {"save.every":
        100}. elastic has to be False.
        """
        if elastic is not False:
            raise _optimizer.refused(f"elastic={elastic!r} is not supported yet",
                                     "elastic=False; a stopped run is resumed with run=FOLDER")
        module = getattr(engine, "module", None) if isinstance(engine, (Engine, Model)) else None
        if isinstance(engine, Engine):
            plan = plan if plan is not None else engine.choice if engine.choice is not None else engine.file
            if plan is None:
                raise TypeError("the engine was compiled without a plan; autoplan makes one")
            precision = engine.precision if precision is None else precision
            choice, file, _, _ = _plan(plan)
            source = _model_of(choice, file, None)
        elif isinstance(engine, (Model, str, os.PathLike)):
            source = source_of(engine)
        elif is_module(engine):
            # What optimize gave has the parameters of the user's module, and another forward.
            module = getattr(getattr(type(engine), "_deepwell", None), "module", engine)
        else:
            raise TypeError(f"an engine is a torch module, or what capture or compile gave, not a "
                            f"{type(engine).__name__}")
        if module is not None:
            source = f"./{PROGRAM}"
        return cls(source, module, optimizer=optimizer, scheduler=scheduler, dataloader=dataloader,
                   plan=plan, precision=precision, run=run, device=device, settings=settings or {})

    def fit(self, steps: int | None = None) -> Fitted:
        """Trains, and writes the weights back into the module, in place.

        steps is the length of the whole run; without it, once through the loader. A loader that is
        shorter begins again. Ctrl-C stops after a step and saves: fit with the same run goes on from
        there, given the same batches from the first. What the loader raises stops the run likewise.
        """
        if steps is None:
            try:
                steps = len(self._dataloader)  # type: ignore[arg-type]
            except TypeError:
                raise TypeError("the dataloader has no length; give fit the number of steps") from None
        begin = time.monotonic()
        shape, copied, batches = self._begin()
        folder = pathlib.Path(self._run or _new_folder())
        before = set(folder.iterdir()) if self._run and folder.is_dir() else None
        folder.mkdir(parents=True, exist_ok=True)
        try:
            text, shape = self._recipe(folder, shape, steps)
            if copied and not shape.shifts:
                raise ValueError("labels are the input_ids, which the module would learn to repeat, since it does "
                                 "not move labels itself; give the next tokens as labels, or no labels")
        except BaseException:
            _forget(folder, before)
            raise
        (folder / "run.toml").write_text(text, "utf-8")
        feed = _batches.Feed(shape, batches, steps, time.perf_counter)
        _, _, argument, files = _plan(self._plan)
        words = ["--plan", argument] if self._plan is not None else []
        said = _run(["train", str(folder / "run.toml"), "--device", self._device, *words], files, feed)
        done = _fitted(said, str(folder), time.monotonic() - begin, feed)
        if feed.failed is not None:
            feed.failed.add_note(f"training stopped after step {done.step} of {done.steps}, saved in "
                                 f"{folder}")
            raise feed.failed
        if said.error is not None:
            said.error.result = done
            raise said.error
        if self._module is not None:
            _write_back(self._module, str(folder))
        if done.step < steps and feed.sent < steps:
            warnings.warn(f"the dataloader has ended after step {done.step} of {steps}; the run is saved in {folder}, "
                          "and run= goes on with it", stacklevel=2)
        return done

    def __repr__(self) -> str:
        what = self._source if self._module is None else type(self._module).__name__
        optimizer = self._optimizer if isinstance(self._optimizer, (str, dict)) else type(self._optimizer).__name__
        return (f"Trainer({what}, optimizer={optimizer!r}, dataloader={type(self._dataloader).__name__}, "
                f"run={self._run or 'a new folder below runs'}, device={self._device})")

    def _begin(self) -> tuple[_batches.Shape, bool, Iterator[Any]]:
        """Takes the first batch to learn its size, and whether its labels are a copy of its ids."""
        batches = _batches.repeated(self._dataloader)
        first = next(batches, None)
        if first is None:
            raise ValueError("the dataloader has no batch")
        name = "input_ids"
        if self._module is not None:
            name = next(iter(inspect.signature(self._module.forward).parameters), name)
        given = _batches.arrays(first, name)
        ids = _batches.ints("input_ids", given["input_ids"])
        labels = _batches.ints("labels", given["labels"]).data if "labels" in given else None
        packed = bool({"position_ids", "segment_ids"} & given.keys()) and self._module is None
        paired = not (hasattr(first, "keys"))
        return (_batches.Shape(ids.rows, ids.columns, min(_batches.DOCUMENTS, ids.columns) if packed
                               else 1, labels is not None and not paired, name),
                labels == ids.data, itertools.chain([first], batches))

    def _recipe(self, folder: pathlib.Path, shape: _batches.Shape, steps: int
                ) -> tuple[str, _batches.Shape]:
        """Gives run.toml, and the shape of batches with what the module does to labels."""
        names: dict[int, str] = {}
        precision = self._precision
        choice, file, _, _ = _plan(self._plan)
        if precision is None and self._plan is not None:
            plan = _planned(choice, file)
            precision = ((choice.precision if choice is not None else None) or plan.get("precision")
                         or plan.get("types", {}).get("params"))
        if self._module is not None:
            from . import _module

            names = {id(p): n for n, p in self._module.named_parameters()}
            precision = precision or _module.dtype(self._module)
        optimizer = _optimizer.keys(self._optimizer, self._scheduler, steps, names)
        source = self._source
        if self._module is not None:
            source = str(folder / PROGRAM)
            begun = os.path.exists(source) and any(folder.glob("checkpoints/step-*"))
            # A run that is resumed goes on with the program that it began with.
            shape = shape._replace(shifts=_module.save(self._module, None if begun else source,
                                                       shape.tokens))
        words, files = _precision(lambda: source, precision)
        if files:
            (folder / "precision.json").write_text(files["policy.json"], "utf-8")
            words = "./precision.json"
        keys: dict[str, object] = {"model": self._source, "out": ".", "steps": steps,
                                   "batch": shape.sequences, "seq": shape.tokens}
        if words is not None:
            keys["precision"] = words
        keys |= {f"optimizer.{k}": v for k, v in optimizer.items()}
        keys["data.sources"] = ["-"]
        return _toml(keys | self._settings), shape


def _forget(folder: pathlib.Path, before: set[pathlib.Path] | None) -> None:
    """Removes what a refused run has written, and its folder unless it was there before."""
    for name in (PROGRAM, f"{PROGRAM}.part.pt2", "precision.json"):
        if before is None or folder / name not in before:
            (folder / name).unlink(missing_ok=True)
    if before is None:
        with contextlib.suppress(OSError):  # somebody else has put something there
            folder.rmdir()


def _new_folder() -> str:
    for n in itertools.count():
        name = time.strftime("%Y%m%d-%H%M%S") + (f"-{n}" if n else "")
        path = os.path.abspath(os.path.join("runs", name))
        with contextlib.suppress(FileExistsError):
            os.makedirs(path)
            return path
    raise AssertionError


def _toml(keys: Mapping[str, object]) -> str:
    """Writes run.toml; a dollar is doubled, since the environment fills in names behind one."""
    lines: list[str] = []
    for name, value in keys.items():
        text = json.dumps(value, ensure_ascii=False, default=float)
        lines.append(f"{name} = {text.replace('$', '$$')}")
    return "\n".join(lines) + "\n"


def _fitted(said: Said, folder: str, seconds: float, feed: _batches.Feed) -> Fitted:
    events = curve(os.path.join(folder, "events.jsonl"))
    last = said.data.get("run") or {}
    times = sorted(e["seconds"] for e in events[-200:])
    middle = times[len(times) // 2] if times else 0.0
    losses = tuple(float(e["loss"]) for e in events)
    step, steps = last.get("step", len(losses)), last.get("steps", feed.count)
    tokens = feed.shape.sequences * feed.shape.tokens
    rate = tokens / middle if middle else 0.0
    text = f"step {step} of {steps}"
    if losses:
        text += f", loss {losses[0]:.3f} to {losses[-1]:.3f}, {rate:,.0f} tok/s"
    evaluated = last.get("eval")
    return Fitted(text=f"{text}, {seconds:.1f} s, in {folder}", data=said.data, run=folder, step=step,
                  steps=steps, losses=losses, eval_loss=None if evaluated is None else float(evaluated),
                  seconds=seconds, step_seconds=middle, tokens_per_second=rate,
                  feed_seconds=feed.seconds / max(1, feed.sent))


def _write_back(module: Any, run: str) -> None:
    from . import _module

    with tempfile.TemporaryDirectory(prefix="deepwell-", dir=run) as scratch:
        folder = os.path.join(scratch, "weights")
        said = _run(["export", run, "--output", folder, "--dtype", "f32"])
        if said.error is not None:
            raise said.error
        _module.load(module, folder)
