"""Numbers that choose rows of a table, or a class of a loss: eager PyTorch raises IndexError where
one is out of range, and the engine reads the nearest row. So they are looked at before a call.

What computes them from the inputs of a call, such as slices of labels or the positions of a
sequence, is a small part of the exported graph, of integers alone. It runs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

aten = torch.ops.aten
MOST = 64  # nodes that compute numbers


class Bound(NamedTuple):
    """What numbers may be: at least low, less than high, or ignored."""

    name: str  # of the input that they come from, or ""
    table: str
    low: int
    high: int
    ignored: int | None = None

    def check(self, numbers: Tensor) -> None:
        if numbers.numel() == 0:
            return
        low, high = (int(x) for x in numbers.aminmax())
        if self.low <= low and high < self.high:
            return
        wrong = (numbers < self.low) | (numbers >= self.high)
        if self.ignored is not None:
            wrong &= numbers != self.ignored
        if found := numbers[wrong].tolist():
            raise IndexError(f"{self.name or 'the sequence'} has the number {found[0]}, and {self.table} "
                             f"{self.low} to {self.high - 1}")


class Bounds:
    """The bounds of all numbers of a program that depend on the inputs of a call only."""

    def __init__(self, exported: Any) -> None:
        self.bounds: list[Bound] = []
        signature = exported.graph_signature
        stored = {s.arg.name: s.target for s in signature.input_specs if s.target is not None}
        values = {**exported.constants, **exported.state_dict}
        # Placeholders by name: a number of the caller's tensors, or a tensor that is not trained.
        self.given: dict[str, int | Tensor] = {}
        for n in exported.graph.nodes:
            if n.op == "placeholder" and isinstance(n.meta.get("val"), Tensor):
                if n.name in signature.user_inputs:
                    self.given[n.name] = sum(isinstance(v, int) for v in self.given.values())
                elif isinstance(t := values.get(stored.get(n.name, "")), Tensor) and _integer(t):
                    self.given[n.name] = t
        graph, wanted = fx.Graph(), []
        made: dict[fx.Node, fx.Node] = {}
        for numbers, bound in _found(exported.graph, stored):
            nodes = self._whole(numbers)
            if nodes is None or any(_changes(n) and nodes & set(n.all_input_nodes) for n in exported.graph.nodes):
                continue
            for n in exported.graph.nodes:
                if n in nodes and n not in made:
                    made[n] = graph.node_copy(n, lambda x: made[x])
            wanted.append(made[numbers])
            self.bounds.append(bound._replace(name=self._source(numbers)))
        graph.output(tuple(wanted))
        self.places = [self.given[n.target] for n in graph.nodes if n.op == "placeholder"]
        self.compute = fx.GraphModule(torch.nn.Module(), graph)

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raises IndexError if a number is out of range."""
        if not self.bounds:
            return
        with torch.no_grad():
            args = [inputs[p] if isinstance(p, int) else p for p in self.places]
            for bound, numbers in zip(self.bounds, self.compute(*args)):
                bound.check(numbers)

    def _whole(self, numbers: fx.Node) -> set[fx.Node] | None:
        """Gives the nodes that compute numbers; None if they need more than inputs and integers."""
        nodes, rest = {numbers}, [numbers]
        while rest:
            n = rest.pop()
            if n.op == "placeholder":
                if n.name not in self.given:
                    return None
            elif n.op != "call_function" or not _integer(n.meta.get("val")) or _changes(n) or len(nodes) > MOST:
                return None
            rest += [x for x in n.all_input_nodes if x not in nodes]
            nodes |= set(rest)
        return nodes

    def _source(self, numbers: fx.Node) -> str:
        """Names the caller's tensor that numbers are taken from; "" if they are counted."""
        rest = [numbers]
        while rest:
            n = rest.pop()
            if isinstance(self.given.get(n.name), int):
                return str(n.name)
            rest += [x for x in n.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
        return ""


def _found(graph: fx.Graph, stored: dict[str, str]) -> Iterator[tuple[fx.Node, Bound]]:
    """Finds nodes that choose by numbers: gives the numbers, and what they may be."""
    for n in graph.nodes:
        if n.op != "call_function":
            continue
        args = n.args
        of = args[0].meta.get("val") if args and isinstance(args[0], fx.Node) else None
        if not isinstance(of, Tensor) or of.dim() == 0:
            continue
        size, numbers, low, ignored = of.shape[0], None, 0, None
        table = f"{stored.get(args[0].name, 'a table')} has rows"
        if n.target is aten.embedding.default:
            numbers = args[1]
        elif n.target is aten.index.Tensor and args[1] and args[1][0] is not None:
            numbers, low = args[1][0], -size
        elif n.target is aten.cross_entropy_loss.default:
            numbers, size = args[1], of.shape[-1 if of.dim() == 1 else 1]
            ignored = args[4] if len(args) > 4 else n.kwargs.get("ignore_index", -100)
            table = "the loss has classes"
        value = numbers.meta.get("val") if isinstance(numbers, fx.Node) else None
        if isinstance(size, int) and isinstance(value, Tensor) and _integer(value) and value.dtype != torch.bool:
            yield numbers, Bound("", table, low, size, ignored)


def _integer(value: Any) -> bool:
    """Says whether a node has integers only: a tensor, sizes, or several of them."""
    if isinstance(value, (tuple, list)):
        return all(map(_integer, value))
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, (int, torch.SymInt, torch.SymBool))


def _changes(n: fx.Node) -> bool:
    """Says whether a node writes into its arguments, or gives something else each time."""
    if not isinstance(n.target, torch._ops.OpOverload):
        return False
    return n.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in n.target.tags
