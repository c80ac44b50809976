"""optimize: a module of the user's whose forward and backward pass run in the engine."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ._report import Report
from ._runtime import Runtime


def optimize(model: nn.Module, example: Any = None, *, verbose: bool = False) -> nn.Module:
    """Gives the module with its forward and backward pass in the engine.

    The result is the same module with another forward: its parameters, buffers, training flag and
    state_dict are the model's own, so that optimizers and checkpoints go on unchanged. example is
    what the module is called with: a tensor, a tuple of arguments, or a dictionary of arguments by
    name; given, the module is exported and compiled now, and not when it is first called. A deep copy
    is optimized, too, and has its own parameters; torch.save and pickle save the model as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize takes a torch.nn.Module, not a {type(model).__name__}; a function is the "
                        "forward of a module, or torch.compile(function, backend=\"deepwell\")")
    if isinstance(getattr(type(model), "_deepwell", None), Runtime):
        raise TypeError("the module is optimized already")
    runtime = Runtime(model, verbose=verbose)
    kind = type(model)

    @torch.compiler.disable
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return runtime.call(args, kwargs)

    body: dict[str, Any] = {
        "forward": forward, "_deepwell": runtime, "__module__": kind.__module__, "__doc__": kind.__doc__,
        "report": property(lambda self: Report.of(runtime)),
        "__reduce_ex__": lambda self, protocol: (_same, (model,)),  # the model itself
        "__deepcopy__": lambda self, memo: optimize(copy.deepcopy(model, memo), verbose=verbose),
    }
    if hasattr(kind, "generate"):  # its caches are no inputs of a program
        body["generate"] = lambda self, *args, **kwargs: model.generate(*args, **kwargs)
    made: Any = type(kind.__name__, (kind,), body)
    optimized: nn.Module = made.__new__(made)
    optimized.__dict__ = model.__dict__
    if example is not None:
        args, kwargs = arguments(example)
        with torch.set_grad_enabled(model.training):
            runtime.prepare(args, kwargs)
    return optimized


def _same(model: nn.Module) -> nn.Module:
    return model


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives an example as positional arguments and arguments by name."""
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}
