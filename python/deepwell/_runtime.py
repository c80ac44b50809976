"""Runs a module in the engine: exports it, compiles it for the shapes that it is called with, and
passes tensors to and fro. optimize, torch.compile's backend and check are made of it."""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from . import _child, _export
from ._bounds import Bounds
from ._child import ALIGNMENT, Child, Memory, Place
from ._program import Error
from ._watch import Watch, hooked, using

# Types of the graph by its names.
TYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16,
         "s8": torch.int8, "u8": torch.uint8, "s16": torch.int16, "s32": torch.int32, "s64": torch.int64,
         "pred": torch.bool, "i1": torch.bool}
NOWHERE: Place = (-1, 0)
MANY = 8  # shapes of one program, or exports for one form of arguments, at which a warning is due
KEPT = 16  # exports for one form of arguments
# An export puts other tensors into a module for a while, which no other thread's call may see.
_calling = threading.RLock()


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(t: Tensor | Draw) -> int:
    size: int = t.numel() * t.dtype.itemsize
    return size


def view(memory: Memory, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Makes a tensor of shared memory, which it keeps."""
    count, raw = math.prod(shape), memory.raw
    # No view of another tensor: the user may change what a call gives in place.
    if isinstance(raw, ctypes.Array):
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(raw, dtype=dtype, count=count, offset=offset).resize_(tuple(shape))
    whole: Tensor = torch.as_tensor(raw, device=raw.device)  # where it is, so without a copy
    at = (whole.storage_offset() + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), at, tuple(shape))


class Draw(NamedTuple):
    """A mask of dropout, which is drawn for each call: 1 with the probability keep, and 0 elsewhere."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    keep: float

    def numel(self) -> int:
        return math.prod(self.shape)


def copied(child: Child, tensors: Sequence[Tensor | Draw | None]) -> tuple[list[Place], Tensor | None]:
    """Copies tensors into one block. The tensor that is returned keeps it."""
    places, total = [], 0
    for t in tensors:
        places.append(total)
        total += 0 if t is None else aligned(bytes_of(t))
    if total == 0:
        return [NOWHERE] * len(places), None
    memory = child.memory(total)
    for t, at in zip(tensors, places):
        if isinstance(t, Draw):
            view(memory, at, t.dtype, t.shape).bernoulli_(t.keep)
        elif t is not None:
            view(memory, at, t.dtype, t.shape).copy_(t.detach())
    return ([NOWHERE if t is None else memory.place(at) for t, at in zip(tensors, places)],
            view(memory, 0, torch.uint8, [1]))


class Variant:
    """A program that is compiled for some shapes."""

    def __init__(self, runtime: Runtime, program: Program, said: Mapping[str, Any],
                 needs: Sequence[bool]) -> None:
        self.runtime = runtime
        self.child = runtime.child
        self.program = program
        self.said = said
        self.reads: list[str] = said["reads"] or []
        self.number: int = said["variant"]
        self.results = [(TYPES[r["type"]], r["dims"], r["seed"]) for r in said["results"] or ()]
        self.used: list[bool] = said["used"] or []
        self.draws = [Draw(TYPES[d["type"]], tuple(d["dims"] or ()), d["keep"]) for d in said["draws"] or ()]
        # Where gradients go: the caller's tensors that need one, then parameters.
        self.sizes: list[int] = [g["bytes"] for g in said["grads"] or ()]
        self.inputs = {g["input"]: i for i, g in enumerate(said["grads"] or ()) if g["input"] >= 0}
        self.params: list[str] = []
        # Of each parameter: the gradient, the place in it and its end, type and shape.
        self.slices: list[tuple[int, int, int, torch.dtype, torch.Size]] = []
        for i, g in enumerate(said["grads"] or ()):
            each = g["bytes"] // max(1, len(g["tensors"] or ()))
            for k, name in enumerate(g["tensors"] or ()):
                if runtime.store.wanted(name):
                    self.params.append(name)
                    t = runtime.store.tensor(name)
                    self.slices.append((i, k * each, k * each + bytes_of(t), t.dtype, t.shape))
        self.differentiable = bool(said["grads"]) and any(seed for _, _, seed in self.results)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[int, list[Tensor], Tensor | None]:
        """Runs the program: gives the number of the call, results, and what keeps the inputs."""
        child = self.child
        args, keep = copied(child, [*(t if used else None for t, used in zip(inputs, self.used)), *self.draws])
        outs, results, held = [], [], []
        for dtype, dims, _ in self.results:
            memory = child.memory(dtype.itemsize * math.prod(dims or ()))
            outs.append(memory.place(0))
            results.append(view(memory, 0, dtype, dims or ()))
            held.append(memory)
        answer = child.request("forward", hold=(held, keep), variant=self.number, args=args, outs=outs)
        return answer["n"], results, keep

    def backward(self, call: int, slopes: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gives the gradients of a call, each as bytes; None where no output with a slope depends on it."""
        child = self.child
        seeds, keep = copied(child, [
            None if s is None or not seed else s.to(dtype) for s, (dtype, _, seed) in
            zip(slopes, self.results)])
        offsets, total = [], 0
        for size in self.sizes:
            offsets.append(total)
            total += aligned(size)
        memory = child.memory(total)
        answer = child.request("backward", hold=(memory, keep), call=call, seeds=seeds,
                               outs=[memory.place(at) for at in offsets])
        none = answer.get("none", ())
        return [None if i in none else view(memory, at, torch.uint8, [size])
                for i, (at, size) in enumerate(zip(offsets, self.sizes))]

    def outputs(self, results: Sequence[Tensor]) -> list[Tensor | int | None]:
        """Gives what the program returns, in the caller's shapes and types."""
        given: dict[int, str | None] = {}  # by result, the name of the value that has it
        out: list[Tensor | int | None] = []
        for i, o in enumerate(self.said["outputs"] or ()):
            if o["result"] < 0:
                out.append(o.get("number"))
                continue
            t, shape = results[o["result"]], tuple(o["dims"] or ())
            name = self.program.names[i] if i < len(self.program.names) else None
            if given.setdefault(o["result"], name) != name:
                t = t.clone()  # another tensor, which the user may change
            out.append((t if t.shape == shape else t.view(shape)).to(TYPES[o["type"]]))
        return out


class _Token(ctypes.Array[ctypes.c_int64]):
    """The number of a call, which is over when this dies."""

    _type_, _length_ = ctypes.c_int64, 1
    held: object = None  # what the backward pass reads


class _Call(torch.autograd.Function):
    """A call with gradients: apply(variant, inputs…, parameters…)."""

    @staticmethod
    def forward(ctx: Any, variant: Variant, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        call, results, keep = variant.forward(tensors[:count])
        store = variant.runtime.store
        ctx.variant = variant
        ctx.inputs = [(t.shape, t.dtype) for t in tensors[:count]]
        ctx.set_materialize_grads(False)
        # What the engine keeps for the backward pass lives as long as the saved tensors of this call:
        # torch drops them after the backward pass, unless the graph is retained, or with the graph. The
        # number is among them, since a checkpoint of torch's drops them and puts another call's there.
        token = _Token(call)
        token.held = store.views
        weakref.finalize(token, variant.child.freed.append, call).atexit = False
        saved = [torch.frombuffer(token, dtype=torch.int64), *([] if keep is None else [keep])]
        # The backward pass reads these again: torch finds out if they were changed meanwhile.
        ctx.save_for_backward(*saved, *map(store.tensor, variant.reads))
        ctx.mark_non_differentiable(*(r for r, (_, _, seed) in zip(results, variant.results) if not seed))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # once_differentiable would leave the second gradient out in silence
            raise RuntimeError("create_graph=True: the engine has no gradients of gradients; call the "
                               "module that was optimized for this part")
        saved = ctx.saved_tensors  # an error of torch's own, if they are gone
        v: Variant = ctx.variant
        raw = v.backward(int(saved[0]), slopes)
        out: list[Tensor | None] = []
        for i, (shape, dtype) in enumerate(ctx.inputs):
            at = v.inputs.get(i)
            r = None if at is None else raw[at]
            out.append(None if r is None else r.view(dtype).view(shape))
        for i, begin, end, dtype, shape in v.slices:
            r = raw[i]
            out.append(None if r is None else r[begin:end].view(dtype).view(shape))
        return (None, None, *out)


class Store:
    """The parameters and buffers of a module in shared memory, where the engine reads them and the
    user's optimizer changes them."""

    def __init__(self, module: nn.Module) -> None:
        # Where each stands: a name may be another's tensor, and the user may put another tensor there.
        self.slots: dict[str, tuple[dict[str, Any], str]] = {}
        self.buffers: set[str] = set()
        for path, part in module.named_modules(remove_duplicate=False):
            for group in (part._parameters, part._buffers):
                for key, t in group.items():
                    if t is not None:
                        name = f"{path}.{key}" if path else key
                        self.slots[name] = (group, key)
                        if group is part._buffers:
                            self.buffers.add(name)
        # What the module consists of: another part is another program.
        self.parts = [(group, tuple(group.values()) if group is part._modules else None, len(group))
                      for part in module.modules() for group in (part._modules, part._parameters, part._buffers)]
        # One parameter under several names is one of the program; its other names are compared with it.
        first: dict[int, tuple[dict[str, Any], str]] = {}
        self.tied = [(slot, one) for slot in self.slots.values()
                     if (one := first.setdefault(id(slot[0][slot[1]]), slot)) is not slot]
        self.none = [(group, key) for group, _, _ in self.parts for key, t in group.items() if t is None]
        self.groups: dict[str, tuple[str, ...]] = {}  # tensors that should follow each other, by each
        self.places: dict[str, Place] = {}
        self.version = 0  # of places
        self.views: dict[str, Tensor] = {}  # replaced and not changed: calls keep what they have seen
        # What is where: the dictionary and key of a tensor, its address, shape, type and name.
        self.seen: list[tuple[dict[str, Any], str, int, torch.Size, torch.dtype, str]] = []

    def tensor(self, name: str) -> Tensor:
        group, key = self.slots[name]
        t: Tensor = group[key]
        return t

    def wanted(self, name: str) -> bool:
        return bool(self.tensor(name).requires_grad)

    def frozen(self) -> list[str]:
        """Names what has no gradient. A buffer that would have one is refused: the engine has none."""
        names = [name for name, (group, key) in self.slots.items() if not group[key].requires_grad]
        if len(names) < len(self.slots) and (left := self.buffers.difference(names)):
            raise without_gradient(min(left))
        return names

    def add(self, child: Child, params: Sequence[Mapping[str, Any]]) -> None:
        """Moves tensors that are not there yet, as the child wants them to follow each other."""
        new: dict[str, None] = {}
        for p in params:
            for name in p["tensors"]:
                t = self.tensor(name)
                if t.dtype != TYPES[p["type"]] or bytes_of(t) * len(p["tensors"]) != p["bytes"]:
                    raise Error("DW2103", f"{name} is {t.dtype} {tuple(t.shape)}; the program has {p['type']}")
                self.groups.setdefault(name, tuple(p["tensors"]))
                if name not in self.places:
                    new[name] = None
        if new:
            self._move(child, new)

    def _move(self, child: Child, names: Mapping[str, None]) -> None:
        """Gives tensors a place: where they are, if that is shared, else in new memory. What was there
        before stays as it is: the user, or a call whose backward pass is to come, may have it."""
        places, views, strays = dict(self.places), dict(self.views), {}
        first: dict[object, str] = {}  # names of the same tensor
        for name in names:
            t = self.tensor(name)
            # Another module, or another graph of torch.compile, may have moved it already.
            found = child.locate(t.data_ptr(), bytes_of(t)) if t.is_contiguous() else None
            if found is not None:
                places[name], views[name] = found, t.detach()
                continue
            strays[name] = first.setdefault((t.data_ptr(), t.shape, t.stride()) if t.numel() else id(t), name)
        spots, total = self._layout([name for name, same in strays.items() if name == same])
        if strays:
            memory = child.memory(total)
            child.settle(memory)
        for name, same in strays.items():
            t = self.tensor(name)
            if name == same:
                places[name] = memory.place(spots[name])
                views[name] = view(memory, spots[name], t.dtype, t.shape)
                views[name].copy_(t.detach())
            places[name], views[name] = places[same], views[same]
        for name in strays:  # when all are copied: one may be a part of another
            # A tensor that stands in for a parameter, as in functional_call, is copied for each call.
            if name in self.buffers or isinstance(self.tensor(name), nn.Parameter):
                self.tensor(name).data = views[name]
        self.places, self.views = places, views
        self.version += 1
        self.seen = [(*self.slots[name], v.data_ptr(), v.shape, v.dtype, name) for name, v in views.items()]

    def _layout(self, names: Sequence[str]) -> tuple[dict[str, int], int]:
        """Gives offsets in a new block: tensors that the child wants to follow each other do."""
        spots: dict[str, int] = {}
        total = 0
        for name in names:
            if name in spots:
                continue
            group = self.groups[name]
            for part in group if set(group) <= set(names) else (name,):
                if part not in spots:
                    spots[part] = total
                    total += bytes_of(self.tensor(part))
            total = aligned(total)
        return spots, total

    def same(self) -> bool:
        """Says whether the module has the parts that it had."""
        for group, parts, count in self.parts:
            if len(group) != count or parts and any(a is not b for a, b in zip(group.values(), parts)):
                return False
        if any(group.get(key) is not other.get(of) for (group, key), (other, of) in self.tied):
            return False
        return all(group.get(key) is None for group, key in self.none)

    def refresh(self, child: Child) -> bool:
        """Finds tensors that were replaced, and gives them a place; False if one no longer fits."""
        moved: dict[str, None] = {}
        for group, key, address, shape, dtype, name in self.seen:
            t = group.get(key)
            if t is None or t.shape != shape or t.dtype != dtype:
                return False
            if t.data_ptr() != address or not t.is_contiguous():
                if t.device != self.views[name].device:
                    return False
                moved[name] = None
        if moved:
            self._move(child, moved)
        return True


class Program:
    """One export of a module: for one form of its arguments, and for the module as it is."""

    def __init__(self, exported: Any, said: Mapping[str, Any], watch: Watch) -> None:
        self.exported = exported
        self.watch = watch
        self.tree = exported.call_spec.out_spec
        self.values = [getattr(spec.arg, "value", None) for spec in exported.graph_signature.output_specs]
        self.names = [getattr(spec.arg, "name", None) for spec in exported.graph_signature.output_specs]
        self.number: int = said["program"]
        self.variants: dict[object, Variant] = {}
        self.known: dict[object, dict[Any, int] | None] = {}  # symbols by the shapes of inputs
        self.bound = 0
        self.bounds = Bounds(exported)
        names = exported.graph_signature.user_inputs
        values = {n.name: n.meta.get("val") for n in exported.graph.nodes if n.op == "placeholder"}
        self.sizes = [values[n].shape for n in names if isinstance(values.get(n), Tensor)]

    def restored(self, outputs: Sequence[Tensor | int | None]) -> Any:
        """Puts outputs into the form that the module returns."""
        return pytree.tree_unflatten([value if t is None else t for value, t in zip(self.values, outputs)],
                                     self.tree)

    def symbols(self, inputs: Sequence[Tensor]) -> dict[Any, int] | None:
        """Gives the sizes that symbols of the export stand for; None if the export has other sizes."""
        key = tuple(t.shape for t in inputs)
        if key not in self.known:
            self.known[key] = self._symbols(key)
        return self.known[key]

    def _symbols(self, shapes: Sequence[Sequence[int]]) -> dict[Any, int] | None:
        ranges = self.exported.range_constraints
        found: dict[Any, int] = {}
        pairs = [(n, size) for shape, sizes in zip(shapes, self.sizes) for n, size in zip(shape, sizes)]
        for n, size in pairs:
            if isinstance(size, int):
                if n != size:
                    return None
                continue
            e = size.node.expr
            if e in ranges and not ranges[e].lower <= n <= ranges[e].upper:
                return None
            if e.is_Symbol and found.setdefault(e, n) != n:
                return None
        symbolic = [(n, size.node) for n, size in pairs if not isinstance(size, int)]
        if len(shapes) != len(self.sizes) or any(node.expr.subs(found) != n for n, node in symbolic):
            return None
        for _, node in symbolic[:1]:  # what the module asked of sizes on its way
            known = {**{s: e.subs(found) for s, e in node.shape_env.replacements.items()}, **found}
            if any(guard.expr.subs(known) == False for guard in node.shape_env.guards):  # noqa: E712
                return None
        return found


class Runtime:
    """A module whose calls run in the engine."""

    def __init__(self, module: nn.Module, verbose: bool = False) -> None:
        self.module = module
        self.verbose = verbose
        self.exports = 0
        self.compiles = 0
        self.empty = 0  # calls without elements
        self.again = 0  # exports since something has changed
        self.seconds = {"export": 0.0, "compile": 0.0}
        self.last: Variant | None = None
        self.notes: list[str] = []  # for the report
        self.reset()

    def reset(self) -> None:
        self.device = home(self.module)
        self.child = _child.child(self.device.index if self.device.type == "cuda" else None)
        self.store = Store(self.module)
        self.programs: dict[object, list[Program]] = {}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any],
                nodes: Sequence[str] = ()) -> tuple[Variant, list[Tensor]]:
        """Exports and compiles what a call needs, and gives the tensors that it takes."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        with torch.inference_mode(False):  # parameters outlive a call in inference mode
            if not self.store.same() or not self.store.refresh(self.child):
                self.reset()
        while True:
            program = self.program(args, kwargs, leaves, tree, inputs)
            program.bounds.check(inputs, program.symbols(inputs) or {})
            known = len(program.watch.fixed)
            variant = self.variant(program, inputs, nodes)
            # What became a constant for these sizes only may have changed since the export.
            if len(program.watch.fixed) == known or not program.watch.changed():
                return variant, inputs

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module in the engine; without any element there is nothing to run there."""
        if any(t.numel() == 0 for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            self.empty += 1
            return self.module.forward(*args, **kwargs)
        with _calling:
            variant, inputs = self.prepare(args, kwargs)
            self.last = variant
            if variant.differentiable and torch.is_grad_enabled():
                params = [self.store.tensor(name) for name in variant.params]
                results = list(_Call.apply(variant, len(inputs), *inputs, *params))
            else:
                results = variant.forward(inputs)[1]
            return variant.program.restored(variant.outputs(results))

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], tree: Any,
                inputs: list[Tensor]) -> Program:
        kind = self.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        known = self.programs.setdefault((cast, torch.get_default_dtype(), tree, tuple(map(_form, leaves))), [])
        why = ""
        for program in reversed(known):
            if program.symbols(inputs) is None:
                continue
            if not (changed := program.watch.changed()):
                if program.watch.sloped and torch.is_grad_enabled():
                    raise without_gradient(program.watch.sloped)
                return program
            why = why or changed
        if home(self.module) != self.device:
            self.reset()
            return self.program(args, kwargs, leaves, tree, inputs)
        for t in inputs:
            if t.device != self.device:
                raise elsewhere("a tensor", t.device, self.device)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="deepwell-") as folder:
            path = os.path.join(folder, "module.pt2")
            with using(self.module) as used, hooked(self.module):
                exported = export(self.module, args, kwargs, path)
            said = self.child.request("open", path=path)
        self.exports += 1
        self.seconds["export"] += time.monotonic() - began
        watch = Watch(self.module, used, exported.constants)
        for spec in exported.graph_signature.input_specs:
            if spec.target in self.store.slots and not live(self.store.tensor(spec.target), spec):
                watch.fix(spec.target, *self.store.slots[spec.target])
        program = Program(exported, said, watch)
        weakref.finalize(program, _close, weakref.ref(self.child), program.number).atexit = False
        known.append(program)
        del known[:-KEPT]
        if why:
            self.again += 1
            if self.again == MANY:
                warnings.warn(f"{type(self.module).__name__} is exported again, for the {MANY}th time, since {why} has "
                              "changed: each export takes time; keep what changes often outside the module, or in "
                              "a parameter or a buffer of numbers with a fraction", stacklevel=2)
        if watch.beyond:
            warnings.warn(f"{type(self.module).__name__} reads {watch.beyond}, which holds more than is watched: "
                          "changes deep in it are not seen", stacklevel=2)
        if used.changed:
            warnings.warn(f"the forward of {type(self.module).__name__} changes {', '.join(used.changed)}, which "
                          "calls of an optimized module do not", stacklevel=2)
        self._say(f"exported in {time.monotonic() - began:.1f} s" + (f", since {why} has changed" if why else ""))
        if watch.sloped and torch.is_grad_enabled():
            raise without_gradient(watch.sloped)
        return program

    def variant(self, program: Program, inputs: Sequence[Tensor],
                nodes: Sequence[str] = ()) -> Variant:
        """Gives the program for the sizes of inputs; nodes of the program are results, too."""
        grad = torch.is_grad_enabled()
        needs = [grad and t.requires_grad for t in inputs]
        frozen = self.store.frozen() if grad else []
        key = (tuple(t.shape for t in inputs), grad, tuple(needs), tuple(frozen), tuple(nodes))
        variant = program.variants.get(key)
        if variant is None:
            began = time.monotonic()
            said = self.child.request("compile", program=program.number, wish={
                "sizes": [list(t.shape) for t in inputs], "grad": grad, "frozen": frozen,
                "inputs": [i for i, need in enumerate(needs) if need], "nodes": list(nodes)})["compiled"]
            self.compiles += 1
            if len(program.variants) == MANY:
                warnings.warn(f"{type(self.module).__name__} is compiled for another shape, the {MANY}th after the "
                              "first: each takes time and memory; pad inputs to few sizes", stacklevel=2)
            self.seconds["compile"] += time.monotonic() - began
            with torch.inference_mode(False):
                for name in said["fixed"] or ():
                    if name in self.store.slots:
                        program.watch.fix(name, *self.store.slots[name])
                held = [f for f in program.watch.fixed.values() if f.holds()]
                self.store.add(self.child, said["params"] or ())
                for f in held:
                    f.moved()
            variant = program.variants[key] = Variant(self, program, said, needs)
            self._say(f"compiled for {[tuple(t.shape) for t in inputs]} in {time.monotonic() - began:.1f} s")
        if program.bound != self.store.version:
            self.child.request("bind", program=program.number, places=self.store.places)
            program.bound = self.store.version
        return variant

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"deepwell: {type(self.module).__name__} {text}", flush=True)


def without_gradient(name: str) -> Error:
    return Error("DW2106", f"{name} is no parameter and requires a gradient, which the engine does not give it",
                 fix=f"make {name} an nn.Parameter or an argument of the module, or detach it")


def live(t: Tensor, spec: Any) -> bool:
    """Says whether the engine reads a tensor in each call; others are constants of the program."""
    return t.is_floating_point() and (isinstance(t, nn.Parameter) or bool(spec.persistent))


def elsewhere(what: str, device: torch.device, other: torch.device | None = None) -> Error:
    fix = 'module.to_empty(device="cpu"), and load its weights' if device.type == "meta" else f'to("{other or "cpu"}")'
    where = "modules run on the CPU or on a GPU" if other is None else f"the module is on {other}"
    return Error("DW2106", f"{what} is on {device}; {where}", fix=fix)


def home(module: nn.Module) -> torch.device:
    """Gives the one device that a module is on. One on several is refused, and so is one on none."""
    found: torch.device | None = None
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if t.device.type not in ("cpu", "cuda"):
            raise elsewhere(name, t.device)
        if found is not None and t.device != found:
            raise elsewhere(name, t.device, found)
        found = t.device
    return found or torch.device("cpu")


def _form(leaf: Any) -> object:
    """Gives what of an argument makes another program of the module."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.device
    if isinstance(leaf, float):
        return type(leaf), leaf.hex()  # -0.0 is another one than 0.0
    if leaf is None or isinstance(leaf, (bool, int, str, torch.dtype, torch.device)):
        return type(leaf), leaf
    raise Error("DW2106", f"an argument is a {type(leaf).__name__}",
                fix="give tensors, numbers and strings, or call the module that was optimized")


def _close(child: weakref.ref[Child], number: int) -> None:
    if (c := child()) is not None and c.alive:
        c.closed.append(number)


# Operators that take numbers with a fraction of one type only, and say so when they run.
PRODUCTS = {getattr(torch.ops.aten, name).default for name in (
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "einsum", "bilinear",
    "scaled_dot_product_attention")}


def same_types(graph: fx.Graph) -> None:
    """Raises what eager PyTorch raises for a product of different types, which an export lets pass."""
    for n in graph.nodes:
        if n.target not in PRODUCTS or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            continue
        values = [x.meta.get("val") for x in n.all_input_nodes]
        kinds = {v.dtype: None for v in values if isinstance(v, Tensor) and v.dtype.is_floating_point}
        if len(kinds) > 1:
            raise RuntimeError(f"{n.target} takes numbers of the same dtype, but got "
                               + " and ".join(str(k).removeprefix("torch.") for k in kinds))


def export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Any:
    """Exports a module as it is called, with sizes that may change where they can, and saves it."""
    # Tensors that an export saves are nobody's: a checkpoint of torch's around the call counts its own.
    unhooked = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.enable_grad(), unhooked, _export.used(module):
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach(), (args, kwargs))
        shapes = torch.export.ShapesCollection()
        for t in pytree.tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.dim() > 0:
                shapes[t] = [Dim.AUTO if i < 2 and n > 1 else Dim.STATIC for i, n in enumerate(t.shape)]
        try:
            exported = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception:
            try:
                exported = torch.export.export(module, args, kwargs, strict=False)
            except Exception as e:
                raise _unexported("export", e) from e
    same_types(exported.graph)
    state, light = exported.state_dict, {}
    shadows: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for spec in exported.graph_signature.input_specs:
        t = state.get(spec.target)
        if isinstance(t, nn.Parameter) and t.dtype.is_floating_point:
            light[spec.target] = shadows.setdefault(id(t), nn.Parameter(t.detach().to("meta"), t.requires_grad))
    # Values of parameters are read where they are, so the file need not have them.
    exported._state_dict = {**state, **light}
    try:
        torch.export.save(exported, path)
    except Exception as e:
        raise _unexported("save", e) from e
    finally:
        exported._state_dict = state
    return exported


def _unexported(what: str, e: Exception) -> Error:
    return Error("DW2106", f"torch.export cannot {what} the module",
                 cause=str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__,
                 fix="see the exception that this one comes from")
