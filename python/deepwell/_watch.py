"""What of a module an export has read beside parameters: attributes, training flags, hooks, and
tensors whose numbers became constants. A program of the engine holds while they are as they were.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._program import Error

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# What modules of torch have for themselves: parts, tensors and hooks are watched as such.
INNER = frozenset(vars(nn.Module())) - {"training"}
FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
SMALL = 1 << 20  # elements of a constant whose values are kept for a comparison
CONTAINERS = (list, dict, tuple, set)
DEPTH, MANY = 3, 64  # of objects in attributes that are watched, and how many of them
_ABSENT = object()
_exporting = threading.RLock()

class Used:
    """Attributes that are read, and plain ones that are changed: modules by id, and names."""

    def __init__(self) -> None:
        self.read: set[tuple[int, str]] = set()
        self.changed: dict[str, None] = {}


@contextlib.contextmanager
def using(module: nn.Module) -> Iterator[Used]:
    """Notes the attributes of a module and of its parts that are used for a while."""
    used, parts = Used(), {id(m) for m in module.modules()}  # others may have the same classes
    with _exporting, contextlib.ExitStack() as stack:
        for kind in {type(m) for m in module.modules()}:
            def read(self: Any, name: str, inner: Any = kind.__getattribute__) -> Any:
                used.read.add((id(self), name))
                return inner(self, name)

            def change(self: Any, name: str, value: Any, inner: Any = kind.__setattr__) -> None:
                if id(self) in parts and isinstance(value, PLAIN) and name in (own := vars(self)) \
                        and not _same(own[name], value):
                    used.changed[name] = None
                inner(self, name, value)

            for name, function in (("__getattribute__", read), ("__setattr__", change)):
                if name in vars(kind):
                    stack.callback(setattr, kind, name, vars(kind)[name])
                else:
                    stack.callback(delattr, kind, name)
                setattr(kind, name, function)
        yield used


@contextlib.contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    """Lets an export run the hooks of a module's parts, and not the module's own, which run around a
    call. Refuses hooks that an export would lose."""
    silent: list[str] = []
    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            for group in (*FORWARD, *BACKWARD):
                hooks = getattr(part, group)
                if not hooks:
                    continue
                if part is not module and group in BACKWARD:
                    raise _lost(name, "a backward hook, which the engine does not run")
                before = dict(hooks)
                stack.callback(hooks.update, before)
                if part is module:
                    hooks.clear()
                    continue
                for key, hook in before.items():
                    hooks[key] = _noted(hook, name, silent)
        yield
    if silent:
        raise _lost(silent[0], "a forward hook that returns nothing: what it does would be done once, in the "
                    "export, and not in each call")


def _noted(hook: Any, name: str, silent: list[str]) -> Any:
    """Gives a hook that notes its module's name if it returns nothing; torch's own write attributes."""
    def run(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None and not type(hook).__module__.startswith("torch."):
            silent.append(name)
        return result

    return run


def _lost(name: str, what: str) -> Error:
    return Error("DW2106", f"{name} has {what}", fix="remove the hook while the module is optimized, or call the "
                 "module that was optimized")


class Watch:
    """The state of a module at an export."""

    def __init__(self, module: nn.Module, used: Used, constants: Mapping[str, Any]) -> None:
        self.flags: list[tuple[Any, str, object, str]] = []  # dictionary, key, value, and its name
        self.containers: list[tuple[Any, str, object, str]] = []  # with a copy for a value
        self.records: dict[int, tuple[object, dict[str, object], str]] = {}  # with a copy of attributes
        self.contents: list[tuple[object, object, str]] = []  # containers in records, and copies
        self.stamps: list[tuple[Tensor, int, str]] = []
        self.fixed: dict[str, _Fixed] = {}
        names = {id(m): name for name, m in module.named_modules()}
        for part in module.modules():
            self._flag(part, "training", names[id(part)])
        for place, key in sorted(used.read):
            if place in names and key not in INNER and key != "training" and not key.startswith("__"):
                self._flag(module.get_submodule(names[place]), key, names[place])
        for name, value in constants.items():
            if isinstance(value, Tensor):
                self.stamps.append((value, version(value), name))
        inner = [m for m in module.modules() if m is not module]
        self.hooks = [getattr(m, group) for m in inner for group in (*FORWARD, *BACKWARD)]
        self.hooked = [(h, tuple(h.values())) for h in self.hooks if h]
        self.count = sum(map(len, self.hooks))

    def _flag(self, part: nn.Module, key: str, path: str) -> None:
        name, own = f"{path}.{key}" if path else key, vars(part)
        if any(key in getattr(part, group) for group in ("_parameters", "_buffers", "_modules")):
            return
        value = own.get(key, _ABSENT)
        for t in pytree.tree_leaves(value):
            if isinstance(t, Tensor):
                self.stamps.append((t, version(t), name))
        if isinstance(value, CONTAINERS):  # an export makes new ones
            self.containers.append((own, key, pytree.tree_map(_copied, value), name))
            return
        self.flags.append((own, key, value, name))
        self._record(value, name, DEPTH)
        if value is _ABSENT:
            for kind in type(part).__mro__:
                if key in vars(kind):
                    if isinstance(given := vars(kind)[key], PLAIN):
                        self.flags.append((vars(kind), key, given, name))
                    break

    def _record(self, value: object, name: str, depth: int) -> None:
        """Watches what a plain object has, and objects and containers in it."""
        if not _is_record(value) or id(value) in self.records or len(self.records) >= MANY:
            return
        self.records[id(value)] = value, (inside := _inside(value)), name
        for key, part in inside.items():
            if isinstance(part, CONTAINERS):
                self.contents.append((part, pytree.tree_map(_copied, part), f"{name}.{key}"))
            elif depth > 1:
                self._record(part, f"{name}.{key}", depth - 1)

    def fix(self, name: str, group: Mapping[str, Any], key: str) -> None:
        """Watches a tensor whose numbers are constants of the program."""
        if name not in self.fixed and isinstance(t := group.get(key), Tensor):
            self.fixed[name] = _Fixed(group, key, t)

    def changed(self) -> str:
        """Names something that is not as it was; "" if all is."""
        for own, key, value, name in self.flags:
            have = own.get(key, _ABSENT)
            if have is not value and not _same(have, value):
                return name
        for own, key, value, name in self.containers:
            have = own.get(key, _ABSENT)
            if type(have) is not type(value) or not _equal(have, value):
                return name
        for record, inside, name in self.records.values():
            if not _equal(_inside(record), inside):
                return name
        for part, copy, name in self.contents:
            if not _equal(part, copy):
                return name
        if sum(map(len, self.hooks)) != self.count or any(tuple(h.values()) != v for h, v in self.hooked):
            return "a hook"
        for t, n, name in self.stamps:
            if version(t) != n:
                return name
        for name, fixed in self.fixed.items():
            if not fixed.holds():
                return name
        return ""


class _Fixed:
    """A tensor of a module whose numbers are constants."""

    def __init__(self, group: Mapping[str, Any], key: str, t: Tensor) -> None:
        self.group, self.key = group, key
        self.stamp = _stamp(t)
        self.values = t.detach().clone() if t.numel() <= SMALL else None

    def holds(self) -> bool:
        t = self.group.get(self.key)
        if not isinstance(t, Tensor):
            return False
        if (stamp := _stamp(t)) == self.stamp:
            return True
        v = self.values
        if v is None or t.dtype != v.dtype or t.shape != v.shape or not torch.equal(t, v):
            return False
        self.stamp = stamp  # written, with what was there
        return True


def version(t: Tensor) -> int:
    """Counts writes into a tensor; one that was made in inference mode does not count them."""
    return -1 if t.is_inference() else t._version


def _stamp(t: Tensor) -> tuple[int, int, int]:
    return id(t), t.data_ptr(), version(t)


def _is_record(value: object) -> bool:
    """Says whether something is a plain object, such as a configuration."""
    return hasattr(type(value), "__slots__" if not hasattr(value, "__dict__") else "__dict__") and not isinstance(
        value, (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType, *PLAIN, *CONTAINERS))


def _inside(record: object) -> dict[str, object]:
    inside = dict(getattr(record, "__dict__", ()))
    for kind in type(record).__mro__:
        for key in (slots,) if isinstance(slots := vars(kind).get("__slots__", ()), str) else slots:
            inside[key] = getattr(record, key, _ABSENT)
    return inside


def _same(have: object, value: object) -> bool:
    return type(have) is type(value) and isinstance(value, PLAIN) and _equal(have, value)


def _copied(leaf: Any) -> Any:
    return set(leaf) if type(leaf) is set else leaf


def _equal(a: object, b: object) -> bool:
    """Compares by identity first; what cannot be compared, as arrays, differs."""
    try:
        return bool(a == b)
    except Exception:
        return False
