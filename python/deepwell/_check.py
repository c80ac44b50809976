"""check: a module in the engine against eager PyTorch, and the first block that differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._optimize import arguments
from ._program import Error
from ._runtime import Runtime, Variant

# Bounds on the norm of a difference, relative to the norm. In f32 a unit is 6e-8; a few hundred
# operations in another order came to 6e-7 in outputs and 3e-6 in gradients of the models that were
# tried, and a wrong operation to 1e-3 or more. A gradient that is nearly 0, as of a bias of keys, is
# noise: its norm counts as a thousandth of the largest at least.
FORWARD = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
GRADIENTS = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
FLOOR = 1e-3


class Difference(NamedTuple):
    """A tensor of the engine against PyTorch's."""

    name: str
    distance: float
    bound: float


class Check:
    """What check found. It is true if everything agrees."""

    def __init__(self, outputs: list[Difference], gradients: list[Difference], block: str | None) -> None:
        self.outputs = outputs
        self.gradients = gradients
        self.block = block  # the first module that differs; None if nothing does

    def __bool__(self) -> bool:
        return self.block is None

    def __str__(self) -> str:
        lines = []
        for what, list_ in (("outputs", self.outputs), ("gradients", self.gradients)):
            if list_:
                worst = max(list_, key=lambda d: d.distance / d.bound)
                lines.append(f"{what}: {len(list_)}, the worst is {worst.name}, {worst.distance:.1e} of at most "
                             f"{worst.bound:.0e}")
        lines.append("agrees with eager PyTorch" if self else f"differs from eager PyTorch first in {self.block}")
        return "\n".join(lines)

    __repr__ = __str__


def check(model: nn.Module, example: Any) -> Check:
    """Compares the outputs and gradients of a module in the engine with eager PyTorch's.

    model may be optimized or not; example is as for optimize. The gradients are of all outputs,
    each with random weights. Where something differs, the first module whose output does is
    named, or, if only gradients do, the module of the parameter that comes first on the way back.
    """
    runtime = getattr(type(model), "_deepwell", None) or Runtime(model)
    args, kwargs = arguments(example)
    plain = runtime.module
    seen, hooks = _outputs_of_modules(plain)
    try:
        with torch.enable_grad():
            want = plain(*args, **kwargs)
    finally:
        for h in hooks:
            h.remove()
    with torch.enable_grad():
        variant, inputs = runtime.prepare(args, kwargs)
        if variant.draws:
            raise Error("DW2106", "the module drops at random, and PyTorch would draw other masks",
                        fix="check it in eval mode, or with dropout of 0")
        have = runtime.call(args, kwargs)
    forward, backward = (_bound(variant.program.exported, table) for table in (FORWARD, GRADIENTS))
    pairs = [(name, h, w) for (name, h), (_, w) in zip(_tensors(have), _tensors(want))]
    outputs = [_compared(name, h, w, forward) for name, h, w in pairs]
    if any(d.distance > d.bound for d in outputs):
        return Check(outputs, [], _first(runtime, variant, args, kwargs, seen, forward) or "the outputs")
    gradients = _gradients(plain, pairs, backward)
    wrong = [d.name for d in gradients if d.distance > d.bound]
    order = {path: i for i, path in enumerate(seen)}
    last = max(wrong, key=lambda n: order.get(n.rpartition(".")[0], -1), default=None)
    return Check(outputs, gradients, None if last is None else f"the gradient of {last}")


def _bound(exported: Any, table: dict[Any, float]) -> float:
    """Gives the bound of the narrowest type that the program computes in, as under autocast."""
    types = {v.dtype for n in exported.graph_module.modules() if hasattr(n, "graph")
             for node in n.graph.nodes if isinstance(v := node.meta.get("val"), Tensor)}
    return max((table[t] for t in types if t in table), default=table[torch.float32])


def _tensors(tree: Any) -> list[tuple[str, Tensor]]:
    return [(pytree.keystr(path).strip("[]'.") or "output", t)
            for path, t in pytree.tree_flatten_with_path(tree)[0] if isinstance(t, Tensor)]


def _outputs_of_modules(module: nn.Module) -> tuple[dict[str, Tensor], list[Any]]:
    """Keeps the first output of each module, in the order in which calls end."""
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            first = next((t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)), None)
            if first is not None and path not in seen:
                seen[path] = first.detach()
        return hook

    return seen, [m.register_forward_hook(keep(path)) for path, m in module.named_modules() if path]


def _compared(name: str, have: Tensor, want: Tensor, bound: float, floor: float = 0.0) -> Difference:
    h, w = have.detach(), want.detach()
    if h.shape != w.shape or h.dtype != w.dtype:
        return Difference(name, float("inf"), bound)
    if not w.dtype.is_floating_point:  # how many differ
        return Difference(name, float((h != w).sum()), bound)
    h, w = h.double(), w.double()
    same = (h == w) | h.isnan() & w.isnan()  # infinities and NaN, too
    norm = float(w.where(w.isfinite(), 0).norm())
    distance = float((h - w).where(~same, 0).norm()) / max(norm, floor, 1e-12)
    return Difference(name, distance if distance == distance else float("inf"), bound)


def _gradients(plain: nn.Module, pairs: list[tuple[str, Tensor, Tensor]], bound: float) -> list[Difference]:
    params = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    rows = [(h, w) for _, h, w in pairs if w.requires_grad and h.requires_grad]
    if not params or not rows:
        return []
    chance = torch.Generator().manual_seed(0)
    slopes = [torch.randn(w.shape, generator=chance, dtype=torch.float32).to(w.dtype) for _, w in rows]
    have, want = (torch.autograd.grad([r[i] for r in rows], list(params.values()), slopes, allow_unused=True)
                  for i in range(2))
    largest = max((float(w.norm()) for w in want if w is not None), default=0.0)
    out = []
    for name, h, w in zip(params, have, want):
        if h is None and w is None:
            continue
        like = w if w is not None else h
        h, w = (torch.zeros_like(like) if t is None else t for t in (h, w))
        out.append(_compared(name, h, w, bound, FLOOR * largest))
    return out


def _first(runtime: Runtime, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any],
           seen: dict[str, Tensor], bound: float) -> str | None:
    """Finds the first module whose output differs: the innermost one, since its call ends first."""
    taps = dict(_results(variant.program.exported))
    taps = {path: node for path, node in taps.items() if path in seen}
    with torch.enable_grad():
        watched, inputs = runtime.prepare(args, kwargs, list(taps.values()))
        outputs = watched.outputs(watched.forward(inputs)[1])
    values = dict(zip(taps, outputs[len(outputs) - len(taps):]))
    for path, want in seen.items():
        have = values.get(path)
        if not isinstance(have, torch.Tensor) or not want.dtype.is_floating_point or have.numel() != want.numel():
            continue
        d = _compared(path, have.view(want.shape), want, bound)
        if d.distance > d.bound:
            return path
    return None


def _results(exported: Any) -> Iterator[tuple[str, str]]:
    """Gives the node that is the result of each module: the one that is read outside of it."""
    inside: dict[str, list[Any]] = {}
    for node in exported.graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            inside.setdefault(path, []).append(node)
    for path, nodes in inside.items():
        own = set(nodes)
        read = [n for n in nodes if any(u not in own for u in n.users) and isinstance(n.meta.get("val"), Tensor)]
        if path and len(read) == 1:
            yield path, read[0].name
