"""The calls: each runs the command of its name (autoplan: plan) and gives a typed result."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ._program import Error, Said, run
from ._results import (GPU, Choice, DryRun, Engine, Exported, Machine, Model, Plan, PrecisionPolicy,
                       source_of)

Path = str | os.PathLike[str]
Source = Model | Path
R = TypeVar("R")


def probe(*, measure: bool = False) -> Machine:
    """Shows this machine's hardware; measure also times the CPU engine."""
    return _machine(_good(run(["probe", *_flag("measure", measure)])))


def _machine(said: Said) -> Machine:
    d = said.data
    gpus = tuple(GPU(name=g["name"], card=g.get("card", ""),
                     compute_capability=g.get("compute_capability", ""),
                     memory_bytes=g.get("memory_bytes", 0), formats=tuple(g.get("formats", ())))
                 for g in d["gpus"])
    return Machine(text=said.text, data=d, gpus=gpus, cores=d["host"]["cpu"]["cores"],
                   memory_bytes=d["host"]["memory_bytes"],
                   engines={e["name"]: e["installed"] for e in d.get("engines", ())})


def capture(source: Any, *, seq_len: int | None = None, scan: bool = False,
            output: Path | None = None) -> Model:
    """Finds a model and counts it: a preset, a folder, hf:ORG/NAME of the Hugging Face cache, a file
    of torch.export.save, or a module of torch.

    A module is exported into a file that is there until Python ends. seq_len is the longest sequence
    of it that is wanted. scan looks for NaN and Inf in weights of any size; output is a file for the
    model's graph.
    """
    module = source if is_module(source) else None
    name = source_of(source if module is None else _exported(module, seq_len))
    said = _good(run(["capture", name, *_option("seq", seq_len), *_flag("scan", scan),
                      *_option("output", output)]))
    m = said.data["model"]
    return Model(text=said.text, data=said.data, source=name, name=m["name"], family=m["family"],
                 parameters=m["parameters"], layers=m["layers"], context=m["context"],
                 training_flops=m["training_flops"], module=module)


def is_module(value: object) -> bool:
    """Says whether something is a module of torch, without importing it: who has one has done so."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when Python ends."""
    return tempfile.TemporaryDirectory(prefix="deepwell-")


def _exported(module: Any, seq_len: int | None) -> str:
    from . import _module

    path = os.path.join(_scratch().name, f"{type(module).__name__}-{next(_count)}.pt2")
    _module.save(module, path, seq_len)
    return path


_count = itertools.count()


def autoplan(model: Source, *, hw: Machine | str, seq_len: int | None = None,
             global_batch: int | str | None = None,
             precision: str | PrecisionPolicy | Sequence[str] | None = None,
             goal: Literal["time", "money", "memory"] = "time", fix: str | None = None,
             top: int = 5, calibrate: Sequence[Path] = (), output: Path | None = None) -> Plan:
    """Finds the best parallel layouts for a model on a cluster.

    hw is a cluster such as "64xgb200", or a probed machine with GPUs. global_batch is in sequences,
    or tokens as in "4Mtok". Of several precisions the best is taken. fix constrains plans, such as
    "tp=8,recompute=none".
    """
    source = source_of(model)
    if not isinstance(precision, (str, PrecisionPolicy, type(None))):
        precision = ",".join(precision)
    words, files = _precision(lambda: source, precision)
    said = _good(run(["plan", source, "--cluster", _cluster(hw), *_option("seq", seq_len),
                      *_option("batch", global_batch), *_option("precision", words),
                      *_option("goal", goal), *_option("fix", fix), *_option("top", top),
                      *_option("calibrate", _commas(calibrate)),
                      *_option("output", output)], files))
    d = said.data
    kept = precision if isinstance(precision, PrecisionPolicy) or _is_file(precision) else None
    return Plan(text=said.text, data=d, model=d["model"], cluster=d["cluster"],
                choices=tuple(_choice(c, kept) for c in d["plans"]))


def _choice(c: Mapping[str, Any], precision: Any) -> Choice:
    return Choice(plan=json.dumps(c["plan"], indent=2), step_seconds=c["step"],
                  step_interval=(c["low"], c["high"]), tokens_per_second=c["rate"],
                  mfu=c.get("mfu", 0.0), peak_bytes=c["peak"], why=c["why"], precision=precision)


def compile(model: Source | None = None, *, plan: Plan | Choice | Path | None = None,
            hw: Machine | str | None = None, precision: str | PrecisionPolicy | None = None,
            seq_len: int | None = None, batch_size: int | None = None,
            options: Mapping[str, object] | None = None, cudnn: bool = True,
            fallback: Literal["safe"] = "safe") -> Engine:
    """Compiles a plan, or a model or a StableHLO file for hw, with the real compiler; no GPU is needed.

    seq_len and batch_size are for a model without a plan. options are compile options by name. cudnn
    = False builds no cuDNN plans. fallback names what train does with a GEMM whose statistics go
    wrong: it takes the format with more bits, up to BF16; there is no other way yet. An Error with
    exit 3 says that the program does not fit, and has the Engine as its result.
    """
    if fallback != "safe":
        raise ValueError(f'fallback is "safe", not {fallback!r}')
    choice, file, argument, files = _plan(plan)
    if choice is not None and model is not None:
        of = json.loads(choice.plan)["model"]
        if source_of(model) != of:
            raise ValueError(f"the plan is for {of}, not for {source_of(model)}")
    if plan is None:
        if model is None:
            raise TypeError("compile needs a model or a plan")
        argument = source_of(model)
    if precision is None and choice is not None:
        precision = choice.precision
    words, more = _precision(lambda: _model_of(choice, file, model), precision)
    target = [] if hw is None else ["--cluster", _cluster(hw)]
    said = run(["compile", argument, *target, *_option("precision", words), *_option("seq", seq_len),
                *_option("batch", batch_size), *_flag("without-cudnn", not cudnn),
                *(a for k, v in (options or {}).items() for a in ("--set", f"{k}={v}"))],
               {**files, **more})
    if said.error is not None and not said.data.get("stages"):
        raise said.error
    return _made(said, _engine(said, choice, file, precision, getattr(model, "module", None)))


def optimize_for_blackwell(model: Any, *, precision: str | PrecisionPolicy = "mxfp8", seq_len: int,
                           batch_size: int, hw: Machine | str = "1xb200") -> Engine:
    """Captures a model, finds the best plan for a cluster of Blackwell GPUs, and compiles it."""
    found = model if isinstance(model, Model) else capture(model, seq_len=seq_len)
    plan = autoplan(found, hw=hw, seq_len=seq_len, global_batch=batch_size, precision=precision, top=1)
    return compile(found, plan=plan)


def _engine(said: Said, choice: Choice | None, file: str | None,
            precision: str | PrecisionPolicy | None, module: Any) -> Engine:
    stages, ranks = said.data["stages"], said.data.get("ranks", ())
    causes = ("params", "copies", "grads", "optimizer", "activations", "temp", "runtime")
    needs = [(sum(r.get(c, 0) for c in causes), r["capacity"]) for r in ranks]
    if not needs:  # one program: arguments, outputs and temporaries, without what is in place
        needs = [(m["argument"] + m["output"] + m["temp"] - m["alias"], s["capacity"])
                 for s in stages for m in [s["memory"]]]
    memory, capacity = max(needs)
    return Engine(text=said.text, data=said.data, choice=choice, file=file, precision=precision,
                  devices=stages[0]["devices"], compiler=stages[0]["engine"], memory_bytes=memory,
                  capacity_bytes=capacity, module=module)


def dryrun(plan: Engine | Plan | Choice | Path, *, precision: str | PrecisionPolicy | None = None,
           tokens: str = "1T", price: float = 3.0, what_if: str | None = None,
           calibrate: Sequence[Path] = (), report: Path | None = None,
           trace: Path | None = None) -> DryRun:
    """Simulates a plan: time, bubbles, memory, money, and what would help; and the same in BF16.

    report and trace are files for an HTML report and a Perfetto trace. An Error with exit 3 says that
    the plan does not fit, and has the DryRun as its result.
    """
    if isinstance(plan, Engine):
        precision = plan.precision if precision is None else precision
        if plan.choice is None and plan.file is None:
            raise TypeError("the engine was compiled without a plan; autoplan makes one")
        plan = plan.choice if plan.choice is not None else str(plan.file)
    choice, file, argument, files = _plan(plan)
    if precision is None and choice is not None:
        precision = choice.precision
    words, more = _precision(lambda: _model_of(choice, file, None), precision)
    common = ["dryrun", argument, *_option("what-if", what_if), "--tokens", tokens, "--price",
              str(price), *_option("calibrate", _commas(calibrate))]
    said = run([*common, *_option("precision", words), *_option("report", report),
                *_option("trace", trace)], {**files, **more})
    if said.error is not None and "step" not in said.data:
        raise said.error
    base = said
    if (words or _planned(choice, file).get("precision", "bf16")) != "bf16":
        base = run([*common, "--precision", "bf16"], files)
        if base.error is not None and "step" not in base.data:
            raise base.error
    d, b = said.data, base.data
    return _made(said, DryRun(
        text=said.text, data=d, step_seconds=d["step"], step_interval=(d["low"], d["high"]),
        bf16_seconds=b["step"], bf16_interval=(b["low"], b["high"]), tokens_per_second=d["rate"],
        mfu=d.get("mfu", 0.0), peak_bytes=d["peak"], capacity_bytes=d["capacity"]))


def export(source: Source, path: Path, *, dtype: Literal["f32", "bf16", "f16"] | None = None,
           to: Literal["mxfp8", "nvfp4"] | None = None,
           layout: Literal["compressed-tensors", "modelopt"] | None = None,
           skip: Sequence[str] = (), tokenizer: Path | None = None) -> Exported:
    """Writes a run, a checkpoint or a model as a Hugging Face folder that transformers loads.

    to quantizes the weights, but for layers that skip names.
    """
    said = _good(run(["export", source_of(source), "--output", os.fspath(path),
                      *_option("dtype", dtype), *_option("to", to), *_option("layout", layout),
                      *(a for s in skip for a in ("--skip", s)), *_option("tokenizer", tokenizer)]))
    d = said.data
    return Exported(text=said.text, data=d, path=d["output"], parameters=d["parameters"],
                    files=d["files"], bytes=d["bytes"])


def _good(said: Said) -> Said:
    if said.error is not None:
        raise said.error
    return said


def _made(said: Said, result: R) -> R:
    """Gives a result, or raises the error that came with it."""
    if said.error is not None:
        said.error.result = result
        raise said.error
    return result


def _option(name: str, value: object) -> list[str]:
    if value is None:
        return []
    return [f"--{name}", os.fspath(value) if isinstance(value, os.PathLike) else str(value)]


def _commas(paths: Sequence[Path]) -> str | None:
    return ",".join(os.fspath(p) for p in paths) or None


def _flag(name: str, value: bool) -> list[str]:
    return [f"--{name}"] if value else []


def _cluster(hw: Machine | str) -> str:
    if isinstance(hw, str):
        return hw
    if hw.cluster is None:
        raise Error("", "this machine has no GPUs to plan for, or different ones",
                    fix='hw="8xb200", or another cluster')
    return hw.cluster


def _is_file(precision: object) -> bool:
    return isinstance(precision, str) and precision.endswith(".json")


def _precision(model: Callable[[], str],
               precision: str | PrecisionPolicy | None) -> tuple[str | None, dict[str, str]]:
    """Gives the flag for a precision, and the file that it names, if it needs one for the model."""
    if not isinstance(precision, PrecisionPolicy):
        return precision, {}
    return "{policy.json}", {"policy.json": precision.resolve(model()).rules}


def _plan(plan: Plan | Choice | Path | None
          ) -> tuple[Choice | None, str | None, str, dict[str, str]]:
    """Gives a plan as a choice or a file, the argument that names it, and the text of that file."""
    if isinstance(plan, Plan):
        plan = plan.best
    if isinstance(plan, Choice):
        return plan, None, "{plan.json}", {"plan.json": plan.plan}
    if plan is None:
        return None, None, "", {}
    return None, os.fspath(plan), os.fspath(plan), {}


def _model_of(choice: Choice | None, file: str | None, model: Source | None) -> str:
    if model is not None:
        return source_of(model)
    return str(_planned(choice, file)["model"])


def _planned(choice: Choice | None, file: str | None) -> dict[str, Any]:
    """Gives the keys of a plan that the program has read, or is about to."""
    text = choice.plan if choice is not None else pathlib.Path(file or "").read_text("utf-8")
    keys: dict[str, Any] = json.loads(text)
    return keys
