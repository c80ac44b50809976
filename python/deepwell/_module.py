"""A torch module as a file that the program trains, and the trained weights back into the module.

The file is what torch.export.save writes of the module's loss. Nothing of the module is changed but
for the time of the export: its forward, its mode, and what transformers takes for attention.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import mmap
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import _export
from ._program import Error

# What a forward may call its labels. Without one of them the loss is the cross-entropy of its logits.
LABELS = ("labels", "targets")

# Element types of safetensors.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
          "U8": torch.uint8, "BOOL": torch.bool}


def save(module: nn.Module, path: str | None, tokens: int | None) -> bool:
    """Writes the module's loss, for sequences of up to some tokens, or as many as the module says
    that it takes, and says whether it moves labels.

    transformers' models take labels at their own token, and move them to the token before. Without a
    path nothing is written.
    """
    if frozen := [n for n, p in module.named_parameters() if not p.requires_grad]:
        raise Error("", f"{len(frozen)} parameters are frozen, and the engine trains all: "
                    + ", ".join(frozen[:8]), fix="requires_grad_(True)")
    if tokens is None:
        tokens = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    size = max(2, min(tokens or 8, 16))
    ids, labels = (torch.randint(0, _vocabulary(module), (2, size), device=_device(module))
                   for _ in range(2))
    # The file has no size of a batch, and the range of sequences that the program may ask for.
    dims = {0: torch.export.Dim("batch", min=1, max=1 << 20),
            1: torch.export.Dim("seq", min=2, max=max(tokens, 8)) if tokens else torch.export.Dim.AUTO}
    with _as_loss(module):
        training = module.training
        shifts = _shifts(module, ids, labels)
        if path is None:
            return shifts
        module.train()
        given = {"input_ids": ids, "labels": labels}
        try:
            program = torch.export.export(module, (), given, strict=False,
                                          dynamic_shapes={"input_ids": dims, "labels": dims})
        except Exception as e:
            raise _refused(module, given, e) from e
    if not training:
        _no_drops(program)
    torch.export.save(program, path + ".part.pt2")
    os.replace(path + ".part.pt2", path)
    return shifts


def _no_drops(program: Any) -> None:
    """Refuses dropout of a module that was given in eval mode, in which it has none."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.dropout.default and node.args[1] > 0:
            where = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            raise Error("DW2106", f"{(where or [''])[-1] or 'the module'} drops with a probability of {node.args[1]}: a "
                        "module is trained in train mode, and this one was given in eval mode", fix="set its dropout "
                        "to 0, to train as it is in eval mode")


def _refused(module: nn.Module, given: dict[str, Tensor], why: Exception) -> Error:
    """Says why a module cannot be exported: operators that are not supported, if that is the cause."""
    from ._runtime import Runtime

    try:
        Runtime(module).prepare((), given)
    except Error as e:
        return e
    return Error("DW2106", "torch.export cannot export the module for sequences of any length",
                 cause=(str(why).strip().splitlines() or [type(why).__name__])[0],
                 fix="see the exception that this one comes from; optimize(module) takes one length at a time")


def _device(module: nn.Module) -> Any:
    return next(iter(module.parameters())).device


def _vocabulary(module: nn.Module) -> int:
    """Gives a number of tokens that every embedding of the module has."""
    sizes = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    return min([n for n in sizes if n > 1], default=2)


@contextlib.contextmanager
def _as_loss(module: nn.Module) -> Iterator[None]:
    """Lets a module take input_ids and labels and give {"loss", "logits"}, under its own names."""
    inner, training = module.forward, module.training
    given = inspect.signature(inner).parameters
    label = next((n for n in LABELS if n in given), None)
    extra = {"use_cache": False} if "use_cache" in given else {}

    def forward(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if label is None:
            return _loss(inner(input_ids, **extra), labels)
        return _loss(inner(input_ids, **{label: labels}, **extra), labels)

    with _export.used(module):
        module.forward = forward
        try:
            yield
        finally:
            del module.forward
            module.train(training)


def _loss(out: Any, labels: Tensor) -> dict[str, Tensor]:
    """Finds loss and logits among what a forward gives."""
    found: dict[str, Tensor] = {}
    named = {k: out[k] for k in out} if hasattr(out, "keys") else {}
    if isinstance(out, Tensor):
        named = {"loss" if out.dim() == 0 else "logits": out}
    elif isinstance(out, (tuple, list)):
        for one in out:
            if isinstance(one, Tensor):
                named.setdefault("loss" if one.dim() == 0 else "logits", one)
    for name in ("loss", "logits"):
        if isinstance(named.get(name), Tensor):
            found[name] = named[name]
    if "loss" not in found:
        if "logits" not in found:
            raise Error("", f"the module gives neither a loss nor logits, but a {type(out).__name__}",
                        fix='return logits [batch, seq, vocabulary], or {"loss": …, "logits": …}')
        logits = found["logits"]
        found["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return found


def _shifts(module: nn.Module, ids: Tensor, labels: Tensor) -> bool:
    """Says whether a module ignores the first label, since it moves all of them."""
    module.eval()
    other = labels.clone()
    other[:, 0] = (labels[:, 0] + 1) % _vocabulary(module)
    with torch.no_grad():
        a, b = module(input_ids=ids, labels=labels), module(input_ids=ids, labels=other)
    return bool(a["loss"] == b["loss"])


def load(module: nn.Module, folder: str) -> int:
    """Copies the weights of an exported folder into a module, in place, and says how many there were.

    Weights that share their memory still do. Buffers that were not trained stay as they are.
    """
    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    done, unknown = set(), []
    with torch.no_grad():
        for name, value in _tensors(folder):
            if name not in own:
                unknown.append(name)
                continue
            own[name].copy_(value.view(own[name].shape))
            done.add(own[name].data_ptr())
    missing = [n for n, p in module.named_parameters() if p.data_ptr() not in done]
    if missing or unknown:
        raise Error("", "the run trained another module: " + ", ".join(
            [f"no {n}" for n in missing[:4]] + [f"{n} is not in the module" for n in unknown[:4]]))
    return len(done)


def _tensors(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Gives the tensors of a folder's safetensors, mapped."""
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with open(file, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            begin = 8 + int.from_bytes(data[:8], "little")
            for name, t in json.loads(data[8:begin]).items():
                if name == "__metadata__":
                    continue
                first, last = t["data_offsets"]
                if first == last:
                    continue
                flat = torch.frombuffer(data, dtype=torch.uint8, count=last - first,
                                        offset=begin + first)
                yield name, flat.clone().view(DTYPES[t["dtype"]]).view(t["shape"])
                del flat


def dtype(module: nn.Module) -> str:
    """Gives the precision that the module computes in: bf16, or f32."""
    types = {p.dtype for p in module.parameters()}
    return "bf16" if types == {torch.bfloat16} else "f32"
