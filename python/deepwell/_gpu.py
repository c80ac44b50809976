"""Memory of a GPU that torch owns and the engine's process opens, by CUDA IPC.

torch's own way to share a tensor writes handles in a form of each version's, for a receiver that is
torch, so the driver is asked for them here. No GPU has run this with torch: tests run all but the
three methods that call torch.cuda, in memory of a software GPU.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from ._program import Error

HANDLE = 64  # bytes of a CUipcMemHandle


class Driver:
    """The functions of NVIDIA's driver that name memory for other processes."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise Error("DW2014", "NVIDIA's driver cannot be loaded", cause=str(e)) from e
        self.call("cuInit", 0)

    def call(self, name: str, *args: object) -> None:
        result = getattr(self._library, name)(*args)
        if result != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            raise Error("DW2101", f"{name}: {(text.value or b'').decode()} ({result})")

    def inside(self, device: int, do: Callable[[], None]) -> None:
        """Calls something with the device's primary context, which torch uses as well."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        try:
            do()
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(context))
            self.call("cuDevicePrimaryCtxRelease_v2", device)

    def export(self, device: int, address: int) -> tuple[bytes, int]:
        """Gives the handle of the allocation that has an address, and the address's offset in it."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        handle = (ctypes.c_char * HANDLE)()

        def ask() -> None:
            self.call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size),
                      ctypes.c_uint64(address))
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), start)

        try:
            self.inside(device, ask)
        except Error as e:
            raise Error("DW2106", "torch's memory of the GPU cannot be opened by another process",
                        cause=e.what, fix="unset PYTORCH_CUDA_ALLOC_CONF: expandable segments and "
                        "cudaMallocAsync have no handles of this kind") from e
        return handle.raw, address - start.value


@functools.cache
def driver() -> Driver:
    return Driver()


class Lease:
    """Memory of a chunk, as torch takes it; a tensor of it keeps it."""

    def __init__(self, owner: Any, address: int, size: int) -> None:
        self._owner = owner
        self.device = owner.device
        self.address = address
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class Chunk:
    """A piece of memory that the child has opened. Its owner is a tensor, which keeps the whole
    allocation from being freed."""

    descriptor = None

    def __init__(self, space: GPU, size: int) -> None:
        self.size = size
        self._space = space
        self._owner, self._address = space.allocate(size)
        self._handle, self.base = driver().export(space.index, self._address)

    def fields(self) -> dict[str, Any]:
        return {"size": self.base + self.size, "handle": base64.b64encode(self._handle).decode()}

    def opened(self) -> None:
        pass

    def lease(self) -> Any:
        return self._space.lease(self._owner, self._address, self.size)


class GPU:
    """A GPU, where the blocks of its child are. The child sees that GPU alone."""

    arguments = ["gpu"]

    def __init__(self, index: int) -> None:
        self.index = index
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.environment = {"CUDA_VISIBLE_DEVICES": visible.split(",")[index] if visible else str(index)}

    def new(self, size: int) -> Chunk:
        return Chunk(self, size)

    def allocate(self, size: int) -> tuple[Any, int]:
        t = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.index}")
        return t, t.data_ptr()

    def lease(self, owner: Any, address: int, size: int) -> Any:
        return Lease(owner, address, size)

    def wait(self) -> None:
        """Waits for what this process has queued on the GPU: the child has none of its streams."""
        torch.cuda.synchronize(self.index)
