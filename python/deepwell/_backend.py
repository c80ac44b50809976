"""torch.compile(model, backend="deepwell"): the graphs that Dynamo captures run in the engine.

Dynamo gives parameters as inputs of a graph. They are put back under their names in a module that
runs the graph, which is exported and run as any other. What is not supported stays eager, as
torch.compile's contract is; a warning and regions() say so.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._program import Error
from ._report import Report
from ._runtime import Runtime

NOT_SUPPORTED = "DW2106"


class _Region(nn.Module):
    """A module that runs a graph, and has its parameters under the names that the user's module has."""

    def __init__(self, graph: fx.GraphModule, names: Sequence[str | None], values: Sequence[Any]) -> None:
        super().__init__()
        self._graph = [graph]  # not a module of this one
        self._names = names
        for name, value in zip(names, values):
            if name is None:
                continue
            *path, last = name.split(".")
            at: nn.Module = self
            for word in path:
                if word not in at._modules:
                    at.add_module(word, nn.Module())
                at = at.get_submodule(word)
            if isinstance(value, nn.Parameter):
                at.register_parameter(last, value)
            else:
                at.register_buffer(last, value)

    def forward(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        stored = {**dict(self.named_parameters(remove_duplicate=False)),
                  **dict(self.named_buffers(remove_duplicate=False))}
        # An export records the modules and lines that the nodes of the graph have.
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(self._graph[0]).run(
                *(next(rest) if n is None else stored[n] for n in self._names))


def _path(source: str) -> str:
    """Gives the module's path in L['self'].h.0.attn, or in L['self']._modules['h']._modules['0']."""
    words = re.findall(r"\['([^']*)'\]|\.([A-Za-z0-9_]+)", re.sub(r"\._(modules|parameters|buffers)\b", "", source))
    return ".".join(a or b for a, b in words[1:])


class Compiled:
    """One graph that Dynamo gave."""

    def __init__(self, graph: fx.GraphModule, again: int) -> None:
        self.graph = graph
        self.again = again  # how often the frame was compiled before
        self.eager: Error | None = None  # why it is not in the engine
        self.runtimes: dict[tuple[int, ...], Runtime] = {}
        self.sources = []
        for n in graph.graph.nodes:
            stack = {"": ("", nn.Module)}
            for source, kind in (n.meta.get("nn_module_stack") or {}).values():
                if path := _path(source):
                    stack[path] = (path, kind)
            n.meta["nn_module_stack"] = stack
            if n.op == "placeholder":
                name = getattr(getattr(n.meta.get("grapharg"), "source", None), "name", "")
                self.sources.append(name() if callable(name) else name)

    def names(self, values: Sequence[Any]) -> list[str | None]:
        """Gives the names of parameters and buffers among the inputs; None for others."""
        names: list[str | None] = []
        for source, value in zip(self.sources, values):
            kept = isinstance(value, nn.Parameter) or isinstance(value, Tensor) and "._buffers[" in source
            name = _path(source) if kept else None
            if kept and (not name or name in names):
                name = f"lifted{len(names)}"
            names.append(name)
        return names

    @torch.compiler.disable
    def __call__(self, *values: Any) -> Any:
        if self.eager is not None:
            return self.graph(*values)
        names = self.names(values)
        # Dynamo runs one graph for all modules of a class: each has its own parameters.
        key = tuple(id(v) for n, v in zip(names, values) if n is not None)
        rest = tuple(v for n, v in zip(names, values) if n is None)
        try:
            runtime = self.runtimes.get(key)
            if runtime is None:
                runtime = self.runtimes[key] = Runtime(_Region(self.graph, names, values))
            return runtime.call(rest, {})
        except Error as e:
            if e.code != NOT_SUPPORTED:
                raise
            self.eager = e
            warnings.warn(f"a graph of torch.compile stays eager: {e.what}"
                          + "".join(f"; {text}" for text in (e.where, e.cause) if text), stacklevel=_callers())
            return self.graph(*values)


def _callers() -> int:
    """Gives the stacklevel of the line, outside torch and this package, that called the graph."""
    ours = tuple(os.path.dirname(f) + os.sep for f in (__file__, torch.__file__))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and (frame.f_code.co_filename.startswith((*ours, "<"))):
        frame, level = frame.f_back, level + 1
    return level


_graphs: list[Compiled] = []


def backend(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Compiled:
    """Is what Dynamo finds by the name "deepwell"."""
    number = torch._guards.CompileContext.current_compile_id()
    made = Compiled(graph, getattr(number, "frame_compile_id", 0) or 0)
    _graphs.append(made)
    return made


class Regions:
    """The graphs that torch.compile made for the engine. It prints as tables."""

    def __init__(self, graphs: Sequence[Compiled], breaks: dict[str, int]) -> None:
        self.graphs = list(graphs)
        self.eager = [g for g in graphs if g.eager is not None]
        self.recompiles = sum(g.again > 0 for g in graphs)
        self.breaks = breaks  # why Dynamo left a part eager, and how often
        self.reports = [Report.of(r) for g in graphs if g.eager is None for r in g.runtimes.values()]

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} graphs, {self.recompiles} of them recompiled because a guard failed, "
                 f"{len(self.eager)} left eager, {sum(self.breaks.values())} graph breaks"]
        for g in self.eager:
            lines.append(f"eager: {g.eager}")
        for why, n in self.breaks.items():
            lines.append(f"graph break, {n} times: {why.strip().splitlines()[0]}")
        return "\n".join([*lines, *map(str, self.reports)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = str(Regions(self.graphs, self.breaks)).splitlines()[0]
        return f"<p>{head}</p>" + "".join(r._repr_html_() for r in self.reports)


def regions() -> Regions:
    """Reports on all graphs of torch.compile(backend="deepwell") in this process."""
    counters = torch._dynamo.utils.counters
    return Regions(_graphs, dict(counters["graph_break"]))
