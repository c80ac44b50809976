"""Batches of a data loader as the program reads them from standard input (Go: data.Stream)."""

from __future__ import annotations

import array
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._program import Error

# Of the format; the last is the most text that an error may have.
MAGIC, VERSION, BATCH, END, ERROR, TEXT = b"deepwell", 1, 1, 2, 3, 16 << 10

# Names of the arrays [sequences, tokens], in their order; the first name is the one in messages.
ARRAYS = (("input_ids", "ids", "tokens"), ("labels", "targets"), ("position_ids", "positions"),
          ("segment_ids", "segments", "document_ids"), ("attention_mask", "mask"))
DOCUMENTS = 64  # that a sequence has at most, if batches have positions or segments


LIMIT = 1 << 31  # of numbers


class Ints(NamedTuple):
    """Rows of integers: their shape, and their bytes as little-endian int32."""

    rows: int
    columns: int
    data: bytes | memoryview


def ints(name: str, value: Any) -> Ints:
    """Takes a tensor of torch, an array of numpy, or a list of lists."""
    if hasattr(value, "detach"):  # of torch
        import torch

        if value.is_floating_point() or value.is_complex():
            raise _no_tokens(name, value)
        value = value.detach().to("cpu").contiguous().numpy()
    if hasattr(value, "astype"):
        if value.dtype.kind not in "iub":
            raise _no_tokens(name, value)
        shape = tuple(value.shape)
        if value.dtype.itemsize > 4 and value.size and (value.min() < -LIMIT or value.max() >= LIMIT):
            wrong = value[(value < -LIMIT) | (value >= LIMIT)]
            raise IndexError(f"{name} has the number {wrong.flat[0]}, which is no token")
        data: bytes | memoryview = value.astype("<i4", order="C", copy=False).tobytes()
    else:
        try:
            rows = [list(row) for row in value]
        except TypeError:
            raise _refused(f"{name} has a {type(value).__name__} that is no list of sequences") from None
        shape = (len(rows), len(rows[0]) if rows else 0)
        if any(len(row) != shape[1] for row in rows):
            raise ValueError(f"the sequences of {name} have different lengths; pad them")
        try:
            flat = array.array("i", (n for row in rows for n in row))
        except OverflowError:
            raise IndexError(f"{name} has a number of more than 32 bits, which is no token") from None
        except TypeError:
            kinds = {type(n).__name__ for row in rows for n in row if not isinstance(n, int)}
            raise _refused(f"{name} has elements of type {', '.join(sorted(kinds))}, not integers") from None
        if sys.byteorder == "big":
            flat.byteswap()
        data = flat.tobytes()
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{name} has the shape {list(shape)}, not [sequences, tokens]")
    return Ints(*shape, data)


def _no_tokens(name: str, value: Any) -> Error:
    return _refused(f"{name} has elements of type {value.dtype} and the shape {list(value.shape)}, not integers")


def _refused(what: str) -> Error:
    return Error("", f"{what}: Trainer trains on tokens", fix="integers [sequences, tokens]; optimize(module) takes "
                 "any tensors, in a loop of your own", exit=2)


def arrays(batch: Any, ids: str = "input_ids") -> dict[str, Any]:
    """Gives the arrays of a batch by name: of a mapping, of a pair (ids, labels), or ids alone.

    ids is another name of input_ids: of the first argument of the module's forward.
    """
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):  # transformers' BatchEncoding, too
        known = {ids: "input_ids"} | {name: names[0] for names in ARRAYS for name in names}
        if unknown := sorted(set(batch.keys()) - known.keys()):
            raise ValueError(f"a batch has {', '.join(unknown)}, which training does not take; "
                             f"it takes {', '.join(names[0] for names in ARRAYS)}, or a pair (ids, labels)")
        given = {known[name]: batch[name] for name in batch.keys() if batch[name] is not None}
        if "input_ids" not in given:
            raise ValueError(f"a batch has no input_ids, but {', '.join(batch.keys()) or 'nothing'}")
        return given
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2) and _is_array(batch[0]):
        return dict(zip(("input_ids", "labels"), batch))
    return {"input_ids": batch}


def _is_array(value: Any) -> bool:
    """Tells an array of two dimensions or more from a list or an array that is a row of one."""
    if hasattr(value, "shape"):
        return len(value.shape) >= 2
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Sequence)


class Shape(NamedTuple):
    """What all batches of a run have in common."""

    sequences: int
    tokens: int
    documents: int
    shifts: bool  # labels stand at their own token, as transformers has them
    ids: str = "input_ids"  # a name of the ids in mappings


def header(s: Shape) -> bytes:
    return MAGIC + struct.pack("<5I", VERSION, s.sequences, s.tokens, s.documents, s.shifts)


def record(s: Shape, batch: Any) -> list[bytes | memoryview]:
    """Gives a batch as the parts of a record."""
    given = arrays(batch, s.ids)
    bits, parts = 0, []
    for i, names in enumerate(ARRAYS):
        if names[0] not in given:
            continue
        one = ints(names[0], given[names[0]])
        if (one.rows, one.columns) != (s.sequences, s.tokens):
            raise ValueError(f"{names[0]} has {one.rows} sequences of {one.columns} tokens, and the "
                             f"first batch {s.sequences} of {s.tokens}; drop_last=True leaves out a "
                             "smaller last batch")
        bits |= 1 << i
        parts.append(one.data)
    size = 4 + sum(len(p) for p in parts)
    return [struct.pack("<3I", BATCH, size, bits), *parts]


def error(e: BaseException) -> bytes:
    text = f"{type(e).__name__}: {e}".encode("utf-8", "replace")[:TEXT]
    text = text.decode("utf-8", "ignore").encode()  # not half of a character
    return struct.pack("<2I", ERROR, len(text)) + text


def repeated(loader: Iterable[Any]) -> Iterator[Any]:
    """Gives the batches of a loader over and over, or once if it can be read only once."""
    while True:
        batches = iter(loader)
        some = False
        for batch in batches:
            some = True
            yield batch
        if not some or batches is loader:
            return


class Feed:
    """Writes batches into a pipe, from the thread that owns the loader.

    failed is what the loader raised, if it did: the program is told, saves and ends.
    """

    def __init__(self, shape: Shape, batches: Iterator[Any], count: int,
                 clock: Callable[[], float]) -> None:
        self.shape = shape
        self.batches = batches
        self.count = count
        self.clock = clock
        self.failed: Exception | None = None
        self.sent = 0
        self.seconds = 0.0  # spent on turning batches into bytes, without the loader's own time

    def __call__(self, pipe: int) -> None:
        try:
            _write(pipe, header(self.shape))
            for batch in self.batches:
                begin = self.clock()
                parts = record(self.shape, batch)
                self.seconds += self.clock() - begin
                for part in parts:
                    _write(pipe, part)
                self.sent += 1
                if self.sent == self.count:
                    break
            _write(pipe, struct.pack("<2I", END, 0))
        except BrokenPipeError:
            return  # the program has ended, and says why
        except Exception as e:
            self.failed = e
            try:
                _write(pipe, error(e))
            except BrokenPipeError:
                return


def _write(pipe: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view):]
