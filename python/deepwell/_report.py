"""What became of a module: each part, what replaced it, and why."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ._runtime import Runtime

# What operations of the graph are, in the order in which a part is called by them.
NAMES = {"attention": "attention", "dispatch": "experts", "cross_entropy": "cross-entropy",
         "embedding": "embedding", "layer_norm": "layer norm", "rms_norm": "RMS norm", "rope": "rotary embedding",
         "linear": "linear", "dot": "matrix product", "softmax": "softmax", "topk": "top-k"}
# Operations that move nothing, or are gone after compilation.
SHAPES = {"rename", "transpose", "split", "merge", "broadcast", "slice", "concat", "convert", "fill", "iota", "pad"}


class Part(NamedTuple):
    """One module of the model."""

    module: str  # its path; "" for the outermost
    kind: str  # its class
    became: str
    why: str


class Report:
    """The parts of a module. It prints as a table, and shows as one in a notebook."""

    def __init__(self, parts: list[Part], notes: list[str]) -> None:
        self.parts = parts
        self.notes = notes

    @classmethod
    def of(cls, runtime: Runtime) -> Report:
        """Describes what was compiled last."""
        if runtime.last is None and not any(p.variants for ps in runtime.programs.values() for p in ps):
            return cls([], ["nothing was compiled yet: call the module, or give optimize an example"])
        said = (runtime.last or next(v for ps in runtime.programs.values() for p in ps
                                     for v in p.variants.values())).said
        kernels: dict[str, str] = {}
        for c in said["kernels"] or ():
            kernels.setdefault(c["kind"], f"{c['kernel']}: {c['why']}")
        parts = [_part(p, kernels) for p in said["parts"] or ()]
        notes = [f"{runtime.exports} exports, {runtime.compiles} compiled programs "
                 f"({runtime.seconds['export']:.1f} s and {runtime.seconds['compile']:.1f} s)"]
        if runtime.empty:
            notes.append(f"{runtime.empty} calls without elements ran in PyTorch")
        if said["loop"]:
            notes.append(f"layers: {said['loop']}")
        return cls(parts, [*notes, *runtime.notes])

    def __str__(self) -> str:
        rows = [("module", "class", "became", "why"), *self.parts]
        widths = [max(len(r[i]) for r in rows) for i in range(3)]
        lines = ["  ".join([*(r[i].ljust(widths[i]) for i in range(3)), r[3]]).rstrip() for r in rows]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{h}</th>" for h in ("module", "class", "became", "why"))
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in p) + "</tr>" for p in self.parts)
        notes = "".join(f"<p>{html.escape(n)}</p>" for n in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def _part(said: dict[str, object], kernels: dict[str, str]) -> Part:
    ops = said["ops"] or []
    assert isinstance(ops, list)
    named = [NAMES[o] for o in NAMES if o in ops]
    others = [o for o in ops if o not in NAMES and o not in SHAPES]
    became = ", ".join(named)
    if not named:
        became = f"element-wise ({', '.join(others)})" if others else "shapes only, nothing to compute"
    why = [kernels[o] for o in ops if o in kernels]
    if said["loop"]:
        why.append(f"one of {said['loop']} equal layers")
    if not named and others:
        why.append("the compiler fuses it")
    return Part(str(said["path"]), str(said["class"]).rpartition(".")[2], became, "; ".join(why))
