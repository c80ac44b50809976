"""An optimizer of torch, or its name and settings, as keys of run.toml."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from ._program import Error

# Optimizers of the engine by the names that users may give them.
NAMES = {"adamw": "adamw", "adamw_dw": "adamw", "muon": "muon", "sgd": "sgd"}

# Settings of torch's optimizers that change how a step is computed, not what.
HOW = {"foreach", "fused", "capturable", "differentiable", "params", "initial_lr", "decoupled_weight_decay"}

# Settings that are not the engine's, unless they are 0 or False.
OFF = ("amsgrad", "maximize", "momentum", "dampening", "nesterov")

EPS = 1e-8  # of the engine

Keys = dict[str, object]


def keys(optimizer: Any, scheduler: Any, steps: int, names: Mapping[int, str]) -> Keys:
    """Gives the keys of the section [optimizer]. names has the module's parameters by id."""
    if isinstance(optimizer, str):
        return {"name": _name(optimizer)} | _scheduled(None, scheduler, steps)
    if isinstance(optimizer, Mapping):
        given = dict(optimizer)
        if "name" in given:
            given["name"] = _name(given["name"])
        return given | _scheduled(None, scheduler, steps)
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"an optimizer is torch's AdamW, a name or a dict, not a "
                        f"{type(optimizer).__name__}")
    found = _torch(optimizer, names)
    if scheduler is None and getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise refused("the optimizer has a scheduler of learning rates",
                      "give it to from_engine: scheduler=…")
    return found | _scheduled(optimizer, scheduler, steps)


def _name(name: object) -> str:
    if name not in NAMES:
        raise refused(f"there is no optimizer {name!r}", "one of " + ", ".join(NAMES))
    return NAMES[str(name)]


def refused(what: str, fix: str = "") -> Error:
    return Error("", what, fix=fix, exit=2)


def _torch(optimizer: Any, names: Mapping[int, str]) -> Keys:
    """Reads an AdamW, Adam or SGD; what the engine does not compute is refused by its name."""
    kind = type(optimizer).__name__
    if kind not in ("AdamW", "Adam", "SGD"):
        raise refused(f"the engine has no {kind}", 'torch.optim.AdamW, or optimizer="muon"')
    if optimizer.state:
        raise refused(f"the {kind} has made steps already, and the engine begins with none",
                      "give a new one")
    groups = optimizer.param_groups
    first = groups[0]
    for i, group in enumerate(groups):
        for key in sorted(set(group) - HOW - {"weight_decay"}):
            value = group[key]
            if key not in ("lr", "betas", "eps", *OFF):
                raise refused(f"param_groups[{i}] has {key}, which the engine does not know")
            if key in OFF and value:
                raise refused(f"param_groups[{i}] has {key}={value}, which the engine does not compute")
            if key == "eps" and not math.isclose(value, EPS):
                raise refused(f"param_groups[{i}] has eps={value}; the engine's is {EPS}")
            if key in ("lr", "betas") and value != first[key]:
                raise refused(f"param_groups[{i}] has {key}={value}, and param_groups[0] {first[key]}; "
                              "the engine has one for all")
    decay = _decay(groups, names)
    if kind == "Adam" and decay and not first.get("decoupled_weight_decay"):
        raise refused(f"Adam's weight_decay={decay} is part of its gradient; the engine's is not",
                      "torch.optim.AdamW")
    lr = float(first["lr"])
    found: Keys = {"name": "sgd" if kind == "SGD" else "adamw", "lr": [lr, lr], "schedule": "constant",
                   "warmup": 0, "weight_decay": decay, "max_grad_norm": 0.0}
    if "betas" in first:
        found["betas"] = list(map(float, first["betas"]))
    return found


def _decay(groups: Any, names: Mapping[int, str]) -> float:
    """Finds the weight decay. The engine's is of matrices, embeddings among them, not of vectors."""
    matrices: set[float] = set()
    vectors: set[float] = set()
    trained: set[int] = set()
    for i, group in enumerate(groups):
        for p in group["params"]:
            if names and id(p) not in names:
                raise refused(f"param_groups[{i}] has a parameter that is not the module's")
            trained.add(id(p))
            (matrices if p.dim() > 1 else vectors).add(float(group["weight_decay"]))
    if left := [name for k, name in names.items() if k not in trained]:
        raise refused(f"the optimizer lacks {len(left)} parameters of the module: "
                      + ", ".join(left[:4]), "the engine trains all of them")
    if len(matrices) > 1:
        raise refused(f"param_groups give matrices a weight_decay of {sorted(matrices)}; "
                      "the engine has one for all")
    decay = matrices.pop() if matrices else 0.0
    if vectors - {0.0}:
        if vectors != {decay}:
            raise refused(f"param_groups give vectors a weight_decay of {sorted(vectors)}; "
                          "the engine's is for matrices only")
        warnings.warn(f"weight_decay={decay} is for matrices and embeddings only: the engine leaves "
                      "norms and biases out", stacklevel=6)
    return decay


def _scheduled(optimizer: Any, scheduler: Any, steps: int) -> Keys:
    """Reads a schedule: torch's cosine over the whole run, or a constant."""
    if scheduler is None:
        return {}
    kind = type(scheduler).__name__
    if optimizer is None:
        raise refused(f"a {kind} needs the optimizer that it is of",
                      'or optimizer={"schedule": "cosine", …}')
    if kind != "CosineAnnealingLR":
        raise refused(f"the engine has no {kind}",
                      'CosineAnnealingLR, or optimizer={"schedule": "cosine" or "wsd", "warmup": …}')
    if scheduler.T_max != steps or scheduler.last_epoch != 0:
        raise refused(f"CosineAnnealingLR has T_max={scheduler.T_max} and is at step "
                      f"{scheduler.last_epoch}; the run has {steps} steps", f"T_max={steps}, from 0 on")
    return {"lr": [float(scheduler.base_lrs[0]), float(scheduler.eta_min)], "schedule": "cosine",
            "warmup": 0}
