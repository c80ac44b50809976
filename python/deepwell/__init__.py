"""Plan, compile and simulate the training of Transformer models, without a GPU and without torch.

    import deepwell as dw
    plan = dw.autoplan("llama3.1-8b", hw="8xb200", precision="mxfp8")
    print(dw.dryrun(plan))

Each call runs one command of the program that comes with this package. Results are frozen and print
as the command line prints them; what goes wrong is an Error with a code and a fix.
"""

from __future__ import annotations

import importlib as _importlib
from importlib import metadata as _metadata
from typing import TYPE_CHECKING as _TYPES
from typing import Any as _Any

from ._calls import autoplan, capture, compile, dryrun, export, optimize_for_blackwell, probe
from ._follow import follow
from ._program import Error
from ._results import (GPU, Choice, DryRun, Engine, Exported, Machine, Model, Plan, Policy, Precision,
                       PrecisionPolicy)
from ._trainer import Fitted, Trainer

if _TYPES:
    from ._backend import regions
    from ._check import check
    from ._optimize import optimize

__all__ = ["GPU", "Choice", "DryRun", "Engine", "Error", "Exported", "Fitted", "Machine",
           "Model", "Plan", "Policy", "Precision", "PrecisionPolicy", "Trainer", "autoplan", "capture",
           "check", "compile", "dryrun", "export", "follow", "optimize",
           "optimize_for_blackwell", "probe", "regions"]


# What needs torch is imported when it is wanted.
_TORCH = {"optimize": "._optimize", "check": "._check", "regions": "._backend"}


def __getattr__(name: str) -> _Any:
    if name == "__version__":  # asked of the installed package, and only when wanted
        return _metadata.version("deepwell")
    if name in _TORCH:
        return getattr(_importlib.import_module(_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
