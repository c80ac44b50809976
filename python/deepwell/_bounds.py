"""Numbers that choose rows of a table, places of an axis, or a class of a loss: eager PyTorch raises
where one is out of range, and the engine reads the nearest. So they are looked at before a call.

What computes them from the inputs of a call, such as slices of labels or the positions of a
sequence, is a small part of the exported graph, of integers alone. It runs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

aten = torch.ops.aten
MOST = 64  # nodes that compute numbers


class OutOfRange(IndexError, RuntimeError):
    """Eager PyTorch raises the one for tables, and the other for gather and scatter."""


class Bound(NamedTuple):
    """What numbers may be: at least 0, or -size, less than size, or ignored."""

    name: str  # of the input that they come from, or ""
    table: str
    size: Any  # a number, or a symbol of the export
    negative: bool  # -1 is the last
    ignored: int | None = None

    def check(self, numbers: Tensor, symbols: Mapping[Any, int]) -> None:
        if numbers.numel() == 0:
            return
        size = self.size if isinstance(self.size, int) else int(self.size.node.expr.subs(symbols))
        low, high = (int(x) for x in numbers.aminmax())
        least = -size if self.negative else 0
        if least <= low and high < size:
            return
        wrong = (numbers < least) | (numbers >= size)
        if self.ignored is not None:
            wrong &= numbers != self.ignored
        if found := numbers[wrong].tolist():
            raise OutOfRange(f"{self.name or 'the sequence'} has the number {found[0]}, and {self.table} "
                             f"{least} to {size - 1}")


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

    def check(self, inputs: Sequence[Tensor], symbols: Mapping[Any, int]) -> None:
        """Raises OutOfRange if a number is; symbols are sizes of the call."""
        if not self.bounds:
            return
        with torch.no_grad():
            args = [inputs[p] if isinstance(p, int) else p for p in self.places]
            for bound, numbers in zip(self.bounds, self.compute(*args)):
                bound.check(numbers, symbols)

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


# Operators with arguments (self, dim, index, …): all numbers count from the front.
ALONG = (aten.gather.default, aten.index_select.default, aten.index_add.default, aten.index_add_.default,
         aten.index_copy.default, aten.index_copy_.default, aten.index_fill.int_Scalar,
         aten.index_fill_.int_Scalar, aten.scatter.value, aten.scatter.src, aten.scatter_.value,
         aten.scatter_.src, aten.scatter_add.default, aten.scatter_add_.default, aten.scatter_reduce.two,
         aten.scatter_reduce_.two)
BY = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)  # (self, indices, …)
LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)


def _found(graph: fx.Graph, stored: dict[str, str]) -> Iterator[tuple[fx.Node, Bound]]:
    """Finds nodes that choose by numbers: gives the numbers, and what they may be."""
    for n in graph.nodes:
        of = n.args[0].meta.get("val") if n.args and isinstance(n.args[0], fx.Node) else None
        if n.op != "call_function" or not isinstance(of, Tensor):
            continue
        if n.target is aten.one_hot.default and len(n.args) > 1 and n.args[1] > 0:
            yield n.args[0], Bound("", "one_hot has classes", n.args[1], False)
        if of.dim() == 0:
            continue
        for numbers, axis, negative in _choices(n, of):
            value = numbers.meta.get("val") if isinstance(numbers, fx.Node) else None
            if not isinstance(value, Tensor) or not _integer(value) or value.dtype == torch.bool:
                continue
            table, ignored = f"{stored.get(n.args[0].name, 'a table')} has rows", None
            if n.target in LOSSES:
                table = "the loss has classes"
                ignored = n.args[4] if len(n.args) > 4 else n.kwargs.get("ignore_index", -100)
            elif axis % of.dim() != 0:
                table = f"axis {axis % of.dim()} of {stored.get(n.args[0].name, 'a tensor')} has places"
            yield numbers, Bound("", table, of.shape[axis], negative, ignored)


def _choices(n: fx.Node, of: Tensor) -> Iterator[tuple[Any, int, bool]]:
    """Gives the numbers that choose, the axis that they choose from, and whether -1 is the last."""
    args: Any = n.args
    if n.target is aten.embedding.default:
        yield args[1], 0, False
    elif n.target in LOSSES:
        yield args[1], -1 if of.dim() == 1 else 1, False
    elif n.target in ALONG and isinstance(args[1], int):
        yield args[2], args[1], n.target is aten.index_fill_.int_Scalar or n.target is aten.index_fill.int_Scalar
    elif n.target in BY:
        axis = 0
        for index in args[1]:
            yield index, axis, True
            mask = isinstance(index, fx.Node) and index.meta["val"].dtype == torch.bool
            axis += index.meta["val"].dim() if mask else 1


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
