"""What the calls give: frozen, printed as the command line prints them."""

from __future__ import annotations

import html
import json
import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ._program import run


class Precision(StrEnum):
    """Formats of linear-layer GEMMs."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    F32 = "f32"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A command's text and its JSON object; str() gives the text."""

    text: str = field(repr=False)
    data: Mapping[str, Any] = field(repr=False, hash=False)

    def __str__(self) -> str:
        return self.text.rstrip("\n")

    def _repr_html_(self) -> str:
        """Shows the text in a notebook."""
        return f'<pre style="overflow-x: auto; white-space: pre">{html.escape(str(self))}</pre>'


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A GPU of this machine."""

    name: str
    card: str  # in cluster names, such as b200; "" if unknown
    compute_capability: str  # such as 10.0
    memory_bytes: int
    formats: tuple[str, ...]  # that its tensor cores compute with

    @property
    def is_blackwell(self) -> bool:
        return self.compute_capability.split(".")[0] in ("10", "12")

    @property
    def blackwell_variant(self) -> str | None:
        """sm_100 (B200), sm_103 (B300) and sm_120 (RTX) are different; None is no Blackwell."""
        if not self.is_blackwell:
            return None
        return "sm_" + self.compute_capability.rstrip("af").replace(".", "")

    @property
    def supports_mxfp8(self) -> bool:
        return Precision.MXFP8 in self.formats

    @property
    def supports_fp4(self) -> bool:
        return Precision.NVFP4 in self.formats


@dataclass(frozen=True, kw_only=True)
class Machine(Result):
    """What probe found on this machine."""

    gpus: tuple[GPU, ...]
    cores: int
    memory_bytes: int
    engines: Mapping[str, bool] = field(hash=False)  # whether each is installed

    @property
    def cluster(self) -> str | None:
        """Its GPUs as a cluster, such as 8xb200; None if it has none, or different ones."""
        cards = {g.card for g in self.gpus}
        if len(cards) != 1 or cards == {""}:
            return None
        return f"{len(self.gpus)}x{cards.pop()}"


@dataclass(frozen=True, kw_only=True)
class Model(Result):
    """A captured model."""

    source: str  # that other calls and commands take
    name: str
    family: str
    parameters: int
    layers: int
    context: int
    training_flops: float  # per token
    module: Any = field(default=None, repr=False, compare=False)  # of torch, if it was one


@dataclass(frozen=True)
class PrecisionPolicy:
    """The precision of each linear layer: default_compute but for what is sensitive.

    default_compute is a format, which stands for NVIDIA's recipe: some layers stay in BF16. What
    sensitive_layers lists stays in BF16, too: a layer by its number from 0, or linear layers of all
    layers by their name or part of a block, such as "attn", "mlp" or "down". "embedding" and
    "final_linear" are other words for "embed" and "head".
    """

    default_compute: str = Precision.MXFP8
    sensitive_layers: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitive_layers", tuple(self.sensitive_layers))

    def resolve(self, model: Model | str | os.PathLike[str]) -> Policy:
        """Gives the rules for a model, checked."""
        source = source_of(model)
        said = run(["policy", source, self.default_compute])
        if said.error is not None:
            raise said.error
        rules = dict(said.data["policy"])
        if self.sensitive_layers:
            rules["rules"] = [*rules["rules"], *map(_sensitive, self.sensitive_layers)]
            said = run(["policy", source, "{policy.json}"], {"policy.json": json.dumps(rules)})
            if said.error is not None:
                raise said.error
        return Policy(text=said.text, data=said.data, rules=json.dumps(said.data["policy"], indent=2),
                      share=dict(said.data["share"]))


def _sensitive(layer: int | str) -> dict[str, Any]:
    words = {"embedding": "embed", "final_linear": "head"}
    linears = ["attn", "mlp"] if isinstance(layer, int) else [words.get(layer, layer)]
    return {"linears": linears, "layers": str(layer) if isinstance(layer, int) else "all",
            "format": "bf16", "why": "It is listed in sensitive_layers."}


@dataclass(frozen=True, kw_only=True)
class Policy(Result):
    """A policy for one model: rules, and the share of linear-layer FLOPs of each format."""

    rules: str = field(repr=False)  # policy.json
    share: Mapping[str, float] = field(hash=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes policy.json, which all commands take as --precision."""
        pathlib.Path(path).write_text(self.rules + "\n", "utf-8")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One plan that autoplan found."""

    plan: str = field(repr=False)  # plan.json
    step_seconds: float
    step_interval: tuple[float, float]  # of 90 %
    tokens_per_second: float  # and device
    mfu: float
    peak_bytes: int  # of a device
    why: str
    precision: str | PrecisionPolicy | None = field(default=None, repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes plan.json, which compile, dryrun and train take."""
        pathlib.Path(path).write_text(self.plan + "\n", "utf-8")


@dataclass(frozen=True, kw_only=True)
class Plan(Result):
    """What autoplan found; choices has the best first."""

    model: str
    cluster: str
    choices: tuple[Choice, ...]

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the best choice as plan.json."""
        self.best.save(path)


@dataclass(frozen=True, kw_only=True)
class Engine(Result):
    """Programs that were compiled for a cluster."""

    choice: Choice | None = field(repr=False)  # the plan that was compiled, if it was one
    file: str | None  # its file, if it was one
    precision: str | PrecisionPolicy | None
    devices: int
    compiler: str
    memory_bytes: int  # of the fullest device
    capacity_bytes: int
    module: Any = field(default=None, repr=False, compare=False)  # of torch, if it was captured

    @property
    def fits(self) -> bool:
        return self.capacity_bytes == 0 or self.memory_bytes <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class DryRun(Result):
    """A simulated step. dryrun(x)["memory_gb"] is dryrun(x).memory_gb."""

    step_seconds: float
    step_interval: tuple[float, float]  # of 90 %
    bf16_seconds: float  # the same plan in BF16
    bf16_interval: tuple[float, float]
    tokens_per_second: float  # and device
    mfu: float
    peak_bytes: int
    capacity_bytes: int

    @property
    def expected_speedup(self) -> float:
        """How many times as fast as in BF16 the cost model expects a step to be."""
        return self.bf16_seconds / self.step_seconds

    @property
    def speedup_interval(self) -> tuple[float, float]:
        """90 % interval of expected_speedup, if the errors of both predictions were independent.

        They have most of their causes in common, so the true interval is narrower.
        """
        if self.bf16_seconds == self.step_seconds:
            return (1.0, 1.0)
        spread = math.exp(math.hypot(_spread(self.step_interval), _spread(self.bf16_interval)))
        return (self.expected_speedup / spread, self.expected_speedup * spread)

    @property
    def memory_gb(self) -> float:
        """Peak of the fullest device, in 10^9 bytes; the cost model has no interval for it."""
        return self.peak_bytes / 1e9

    @property
    def fits(self) -> bool:
        return self.capacity_bytes == 0 or self.peak_bytes <= self.capacity_bytes

    def __getitem__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self, name):
            raise KeyError(name)
        return getattr(self, name)


def _spread(interval: tuple[float, float]) -> float:
    """Half of an interval's width, as a logarithm."""
    return math.log(interval[1] / interval[0]) / 2


@dataclass(frozen=True, kw_only=True)
class Exported(Result):
    """A written Hugging Face folder."""

    path: str
    parameters: int
    files: int
    bytes: int


def source_of(model: Model | str | os.PathLike[str]) -> str:
    """Gives a model as commands take it; a path is made absolute, as plans name their model."""
    if isinstance(model, Model):
        return model.source
    if isinstance(model, os.PathLike) or isinstance(model, str) and os.sep in model and (
            os.path.exists(model)):
        return os.path.abspath(model)
    if isinstance(model, str):
        return model  # a preset, hf:ORG/NAME, or an error for the program to explain
    raise TypeError(f"a model is a preset, a folder or hf:ORG/NAME, not a {type(model).__name__}")
