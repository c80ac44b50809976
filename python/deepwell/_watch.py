"""What of a module an export has read beside parameters: attributes, training flags, hooks, and
tensors whose numbers became constants. A program of the engine holds while they are as they were.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import operator
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._program import Error

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# What modules of torch have for themselves: parts, tensors and hooks are watched as such.
INNER = frozenset(vars(nn.Module())) - {"training"}
FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
SMALL = 1 << 20  # elements of a constant whose values are kept for a comparison
MANY = 512  # objects and classes in attributes that are watched
# Classes of these are taken as they are; what their objects have is watched.
SETTLED = sys.stdlib_module_names | {"torch", "numpy", "transformers"}
METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
HEAP = 1 << 9  # the flag of classes that Python code may change
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


class _Box:
    """What a container had. An export puts other ones of the same content into a module's attributes, so
    they are compared by content, and other objects in them by identity."""

    def __init__(self, kind: type, keys: list[Any] | None, items: list[Any], more: _Box | None) -> None:
        self.kind, self.keys, self.items, self.more = kind, keys, items, more
        self.boxes = [i for i, x in enumerate(items) if isinstance(x, (_Box, _Bytes))]

    def holds(self, have: Any) -> bool:
        kind: object = type(have)
        if kind is not self.kind or len(have) != len(self.items):
            return False
        if self.more is not None and not self.more.holds(vars(have)):
            return False
        values: Iterable[Any] = have
        if self.keys is not None:
            if not all(map(operator.is_, have, self.keys)) and not all(
                    type(a) is type(b) and _equal(a, b) for a, b in zip(have, self.keys)):
                return False
            values = have.values()
        if not self.boxes and all(map(operator.is_, values, self.items)):
            return True
        return all(map(_holds, values, self.items))


class _Set(_Box):
    def __init__(self, kind: type, members: frozenset[Any], items: list[Any]) -> None:
        super().__init__(kind, None, items, None)
        self.members = members

    def holds(self, have: Any) -> bool:
        return type(have) is self.kind and _equal(have, self.members)


class _Bytes:
    """What an array of numpy's, or another one of bytes, had."""

    def __init__(self, value: Any) -> None:
        self.kind, self.form, self.bytes = type(value), _form(value), _raw(value)

    def holds(self, have: Any) -> bool:
        return type(have) is self.kind and _form(have) == self.form and _raw(have) == self.bytes


class _Record:
    """What a plain object, or a class, had."""

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name
        self.slots = [] if isinstance(value, type) else _slots(type(value))
        self.keys: list[str] = []
        self.items: list[Any] = []
        self.boxes: list[int] = []

    def inside(self) -> Mapping[str, Any]:
        v = self.value
        if isinstance(v, functools.partial):
            return {"func": v.func, "args": v.args, "keywords": v.keywords, **vars(v)}
        if isinstance(v, METHODS):
            return {"__self__": v.__self__}
        own: Mapping[str, Any] = getattr(v, "__dict__", {})
        if self.slots:
            return {**own, **{k: getattr(v, k, _ABSENT) for k in self.slots}}
        return own

    def taken(self, inside: Mapping[str, Any], items: list[Any]) -> None:
        self.keys, self.items = list(inside), items
        self.boxes = [i for i, x in enumerate(items) if isinstance(x, (_Box, _Bytes))]

    def holds(self) -> bool:
        inside = self.inside()
        if len(inside) != len(self.keys):
            return False
        if not self.boxes and all(map(operator.is_, inside.values(), self.items)):
            return all(map(operator.eq, inside, self.keys))
        return all(k in inside and _holds(inside[k], was) for k, was in zip(self.keys, self.items))


class Watch:
    """The state of a module at an export."""

    def __init__(self, module: nn.Module, used: Used, constants: Mapping[str, Any]) -> None:
        self.flags: list[tuple[Any, str, object, str]] = []  # dictionary, key, value, and its name
        self.containers: list[tuple[Any, str, _Box | _Bytes, str]] = []
        self.records: dict[int, _Record] = {}
        self.stamps: dict[int, tuple[Tensor, tuple[object, ...], str]] = {}
        self.fixed: dict[str, _Fixed] = {}
        self.sloped = ""  # a tensor that is no parameter and requires a gradient
        self.beyond = ""  # an attribute with more in it than is watched
        self._kinds: set[tuple[type, str]] = set()  # attributes of the parts' classes
        self._next: collections.deque[_Record] = collections.deque()
        names = {id(m): name for name, m in module.named_modules()}
        self._known = {*names, *(id(t) for t in (*module.parameters(), *module.buffers()))}
        for part in module.modules():
            self._flag(part, "training", names[id(part)])
        for place, key in sorted(used.read):
            if place in names and key not in INNER and key != "training" and not key.startswith("__"):
                self._flag(module.get_submodule(names[place]), key, names[place])
        for name, value in constants.items():
            self._take(value, name)
        while self._next:
            record = self._next.popleft()
            inside = dict(record.inside())
            shared = isinstance(record.value, type)
            record.taken(inside, [v if shared and k.startswith("__") else self._take(v, f"{record.name}.{k}", shared)
                                  for k, v in inside.items()])
        inner = [m for m in module.modules() if m is not module]
        self.hooks = [getattr(m, group) for m in inner for group in (*FORWARD, *BACKWARD)]
        self.hooked = [(h, tuple(h.values())) for h in self.hooks if h]
        self.count = sum(map(len, self.hooks))

    def _flag(self, part: nn.Module, key: str, path: str) -> None:
        name, own = f"{path}.{key}" if path else key, vars(part)
        if any(key in getattr(part, group) for group in ("_parameters", "_buffers", "_modules")):
            return
        self._entry(own, key, own.get(key, _ABSENT), name)
        if key not in own:
            for kind in type(part).__mro__:
                if key in vars(kind):
                    if (kind, key) not in self._kinds:
                        self._kinds.add((kind, key))
                        self._entry(vars(kind), key, vars(kind)[key], name, True)
                    break

    def _entry(self, own: Any, key: str, value: Any, name: str, shared: bool = False) -> None:
        taken = self._take(value, name, shared)
        if isinstance(taken, (_Box, _Bytes)):
            self.containers.append((own, key, taken, name))
        else:
            self.flags.append((own, key, value, name))

    def _take(self, value: Any, name: str, shared: bool = False, around: tuple[int, ...] = ()) -> Any:
        """Gives what a value is compared with, and watches what is in it. shared says that it is of a
        class: what describes its attributes is not looked into."""
        if value is _ABSENT or isinstance(value, PLAIN) or id(value) in self._known or id(value) in around:
            return value
        if isinstance(value, Tensor):
            if value.requires_grad:
                self.sloped = self.sloped or name
            self.stamps[id(value)] = value, _stamp(value), name
            return value
        if isinstance(value, (list, tuple, dict, set, frozenset, collections.deque)):
            around = (*around, id(value))
            more = self._take(vars(value), name, False, around) if hasattr(value, "__dict__") else None
            if isinstance(value, (set, frozenset)):
                value, kind = sorted(value, key=id), type(value)
                return _Set(kind, frozenset(value), [self._take(x, name, False, around) for x in value])
            keys = list(value) if isinstance(value, dict) else None
            items = [self._take(x, f"{name}[{k!r}]", False, around) for k, x in
                     (value.items() if isinstance(value, dict) else enumerate(value))]
            return _Box(type(value), keys, items, more)
        if isinstance(value, bytearray) or callable(getattr(type(value), "tobytes", None)):
            if len(_raw(value)) <= SMALL:
                return _Bytes(value)
            self.beyond = self.beyond or name
        elif not (shared and hasattr(type(value), "__get__")):
            self._look(value, name)
        return value

    def _look(self, value: Any, name: str) -> None:
        """Watches what an object, a class, or an object's class has."""
        if not _is_record(value) or id(value) in self.records:
            return
        if len(self.records) >= MANY:
            self.beyond = self.beyond or name
            return
        self.records[id(value)] = record = _Record(value, name)
        self._next.append(record)
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            if kind is not value and kind.__flags__ & HEAP:
                self._look(kind, name)

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
        for own, key, box, name in self.containers:
            if not box.holds(own.get(key, _ABSENT)):
                return name
        for record in self.records.values():
            if not record.holds():
                return record.name
        if sum(map(len, self.hooks)) != self.count or any(tuple(h.values()) != v for h, v in self.hooked):
            return "a hook"
        for t, stamp, name in self.stamps.values():
            if _stamp(t) != stamp:
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

    def moved(self) -> None:
        """Takes the tensor that is there for the same numbers, in other memory."""
        self.stamp = _stamp(self.group[self.key])


def version(t: Tensor) -> int:
    """Counts writes into a tensor; one that was made in inference mode does not count them."""
    return -1 if t.is_inference() else t._version


def _stamp(t: Tensor) -> tuple[object, ...]:
    try:
        return id(t), t.data_ptr(), version(t), t.shape, t.requires_grad
    except RuntimeError:  # it has no memory, or several pieces
        return id(t), version(t), t.requires_grad


def _is_record(value: object) -> bool:
    """Says whether something is an object, such as a configuration, or a class, whose attributes count."""
    kind = type(value)
    if isinstance(value, type):
        return value.__module__.partition(".")[0] not in SETTLED and not issubclass(value, enum.Enum)
    if isinstance(value, (fx.GraphModule, enum.Enum, types.FunctionType, types.ModuleType)):
        return False
    return hasattr(value, "__dict__") or bool(_slots(kind)) or isinstance(value, METHODS)


def _slots(kind: type) -> list[str]:
    """Lists the attributes of objects that have a place and no dictionary."""
    found: list[str] = []
    for k in kind.__mro__:
        slots = vars(k).get("__slots__", ())
        found += (s for s in ((slots,) if isinstance(slots, str) else slots) if s not in ("__dict__", "__weakref__"))
    return found


def _raw(array: Any) -> bytes:
    return bytes(array) if isinstance(array, bytearray) else bytes(array.tobytes())


def _form(array: Any) -> tuple[object, ...]:
    return getattr(array, "dtype", None), getattr(array, "shape", None), getattr(array, "typecode", None)


def _holds(have: Any, was: Any) -> bool:
    if have is was:
        return True
    return was.holds(have) if isinstance(was, (_Box, _Bytes)) else _same(have, was)


def _same(have: object, value: object) -> bool:
    """Compares numbers, words and the like: 0.0 is not -0.0, and NaN is NaN."""
    if type(have) is not type(value) or not isinstance(value, PLAIN):
        return False
    if isinstance(value, float):
        return isinstance(have, float) and value.hex() == have.hex()
    return _equal(have, value)


def _equal(a: object, b: object) -> bool:
    """Compares by identity first; what cannot be compared, as arrays, differs."""
    try:
        return bool(a == b)
    except Exception:
        return False
