"""The process that runs optimized modules, and the memory that it shares with this one.

There is one child for all modules of this process on the CPU, and one for those on each GPU. It is
started when the first is called, and ends with this process, however that ends: its standard input
is a socket, which then ends.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import mmap
import os
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from ._connection import Connection
from ._program import Error, find

NAME = "deepwell"  # of its memory
MAP_FIXED = 0x10  # of Linux
ALIGNMENT = 256  # bytes, at which the engine uses memory where it is: 64 on the host, more on GPUs
VERSION = 1  # of the protocol
# Bytes of free blocks that are kept, beside as many as are in use.
KEPT = 256 << 20

Place = tuple[int, int]  # a block, and an offset in bytes


class Chunk(Protocol):
    """A piece of memory that this process owns and a child has opened."""

    size: int
    base: int  # where it begins in what the child has opened

    @property
    def descriptor(self) -> int | None: ...  # that goes with the request to map it

    def fields(self) -> dict[str, Any]: ...  # of that request

    def opened(self) -> None: ...  # the child has it

    def lease(self) -> Any: ...  # what tensors hold: the chunk is free when it dies


class Space(Protocol):
    """Where the blocks of a child are."""

    @property
    def arguments(self) -> list[str]: ...  # of the child

    @property
    def environment(self) -> Mapping[str, str]: ...  # of the child, beside this process's own

    def new(self, size: int) -> Chunk: ...

    def wait(self) -> None: ...  # until what this process has queued there is done


class Shared:
    """A chunk of the host's memory: a file without a name that both have mapped."""

    base = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor: int | None = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size)
            self._view = mmap.mmap(self.descriptor, size)  # with a descriptor of its own
            self._inode = os.fstat(self.descriptor).st_ino
            _shared.add(self)
        except BaseException:
            self.opened()
            raise

    def fields(self) -> dict[str, Any]:
        return {"size": self.size}

    def opened(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def lease(self) -> Any:
        return (ctypes.c_char * self.size).from_buffer(self._view)

    def part(self, descriptors: Mapping[int, int]) -> None:
        """Maps the memory for this process alone; descriptors are by number of file."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))
        if _map(address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED,
                descriptors.get(self._inode, -1), 0) != address:
            os.write(2, b"deepwell: a forked process shares the weights of its parent\n")


_shared: weakref.WeakSet[Shared] = weakref.WeakSet()


class Host:
    """The memory of the host."""

    arguments: list[str] = []
    environment: Mapping[str, str] = {}

    def new(self, size: int) -> Shared:
        return Shared(size)

    def wait(self) -> None:
        pass


class Memory:
    """A block of shared memory that is in use. It returns to the child's pool when raw dies."""

    def __init__(self, block: _Block, raw: Any) -> None:
        self.block = block.number
        self.base = block.chunk.base
        self.size = block.size
        self.raw = raw  # a ctypes array, or the lease of a GPU's memory: tensors keep it alive

    @property
    def address(self) -> int:
        return ctypes.addressof(self.raw) if isinstance(self.raw, ctypes.Array) else int(self.raw.address)

    def place(self, offset: int) -> Place:
        return self.block, self.base + offset


class _Block:
    def __init__(self, number: int, chunk: Chunk) -> None:
        self.number = number
        self.size = chunk.size
        self.chunk = chunk


class Child:
    """A running engine."""

    def __init__(self, space: Space) -> None:
        self.pid = os.getpid()
        self._space = space
        self.compiles = 0
        self.live = 0  # calls whose backward pass may be asked for, as the child last said
        # From finalizers: calls, and programs.
        self.freed: collections.deque[int] = collections.deque()
        self.closed: collections.deque[int] = collections.deque()
        self._dead: Error | None = None
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._blocks = itertools.count(1)
        self._stale: dict[int, object] = {}  # requests that are not answered, with what they write to
        self._used = 0
        self._idle: collections.OrderedDict[int, _Block] = collections.OrderedDict()
        self._returned: collections.deque[_Block] = collections.deque()  # from finalizers
        self._unmap: list[_Block] = []  # which the child may still use until it has answered
        self._homes: list[tuple[int, int, Place, weakref.ref[Any]]] = []
        self._log = tempfile.TemporaryFile(prefix="deepwell-")
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours)
        # Its own process group: Ctrl-C reaches this process only.
        with theirs:
            self._process = subprocess.Popen([find(), "__call", *space.arguments], stdin=theirs.fileno(),
                                             stdout=self._log, stderr=self._log, process_group=0,
                                             env={**os.environ, **space.environment})
        self._end = weakref.finalize(self, _end, self._process, ours, self.pid)
        if self.request("hello")["version"] != VERSION:
            raise Error("DW2007", "the program speaks another version of the protocol",
                        fix="install package and program together")

    @property
    def alive(self) -> bool:
        return self._dead is None and self.pid == os.getpid()

    def request(self, do: str, hold: object = None, descriptor: int | None = None,
                **fields: Any) -> dict[str, Any]:
        """Asks for something and waits for the answer, which has the request's number as "n".

        hold is kept until the child has answered, even if the wait is interrupted.
        """
        self._mine()
        with self._lock:
            if self._dead is not None:
                raise self._dead
            if self.closed:
                self.request("close", program=self.closed.popleft())
            self._space.wait()
            number = next(self._numbers)
            freed = [self.freed.popleft() for _ in range(len(self.freed))]
            leaving, self._unmap = self._unmap, []
            message = {"n": number, "do": do, **fields}
            if freed:
                message["free"] = freed
            if leaving:
                message["unmap"] = [block.number for block in leaving]
            try:
                self._stale[number] = (hold, leaving)
                self._connection.send(message, descriptor)
                answer = self._answer(number)
            except ConnectionError:
                raise self._ended() from None
            except Error:
                raise
            except BaseException:  # as a signal's handler may raise, anywhere
                if self._connection.begun(message):
                    self.freed.append(number)  # a call that nobody will hear of
                else:
                    self.freed.extend(freed)
                    self._unmap[:0] = leaving
                raise
            self.live = answer["live"]
        if failed := answer.get("error"):
            raise Error(**{k: v for k, v in failed.items()
                           if k in ("code", "what", "where", "cause", "fix", "exit")})
        return answer

    def _mine(self) -> None:
        if self.pid != os.getpid():
            raise Error("DW2101", "the engine belongs to the process that started it, and this is a fork of it",
                        fix="call the module there, or optimize it again here; workers of a DataLoader prepare "
                        "batches only")

    def _answer(self, number: int) -> dict[str, Any]:
        """Waits for an answer; the child answers in order, and interrupted requests as well."""
        while True:
            answer = self._connection.receive()
            if answer is None:
                raise self._ended()
            for n in [n for n in self._stale if n <= answer["n"]]:
                del self._stale[n]
            if answer["n"] == number:
                return answer

    def _ended(self) -> Error:
        """Finds out how the child ended."""
        self._process.kill()
        status = self._process.wait()
        how = f"status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-status).name
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 2000))
        said = self._log.read().decode(errors="replace").strip().splitlines()
        self._dead = Error("DW2101", f"the engine's process has ended ({how})",
                           cause=said[-1] if said else "",
                           fix="optimize the module again: its parameters are as they were")
        return self._dead

    def memory(self, size: int) -> Memory:
        """Gives a block of at least some bytes, whose content is anything."""
        self._mine()
        with self._lock:
            while self._returned:
                block = self._returned.popleft()
                self._used -= block.size
                self._idle[block.number] = block
            size = _rounded(size)
            for block in reversed(self._idle.values()):
                if block.size == size:
                    del self._idle[block.number]
                    break
            else:
                block = self._new(size)
            self._used += block.size
            idle = sum(b.size for b in self._idle.values())
            while idle > max(KEPT, self._used):
                _, old = self._idle.popitem(last=False)
                idle -= old.size
                self._unmap.append(old)
        raw = block.chunk.lease()
        weakref.finalize(raw, self._returned.append, block).atexit = False
        return Memory(block, raw)

    def settle(self, memory: Memory) -> None:
        """Remembers that a block holds parameters, which others may use where they are."""
        start = memory.address
        self._homes.append((start, start + memory.size, memory.place(0), weakref.ref(memory.raw)))

    def locate(self, address: int, size: int) -> Place | None:
        """Finds memory among the blocks that hold parameters."""
        self._homes = [h for h in self._homes if h[3]() is not None]
        for start, end, (block, base), _ in self._homes:
            if start <= address and address + size <= end:
                return block, base + address - start
        return None

    def _new(self, size: int) -> _Block:
        chunk = self._space.new(size)
        block = _Block(next(self._blocks), chunk)
        try:
            self.request("map", block=block.number, descriptor=chunk.descriptor, **chunk.fields())
        except BaseException:
            self._unmap.append(block)  # which the child may have
            raise
        finally:
            chunk.opened()
        return block


def _rounded(size: int) -> int:
    """Gives one of few sizes, at most an eighth larger, so that blocks can be used again."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return max(1, -(-size // step)) * step


def _end(process: subprocess.Popen[bytes], connection: socket.socket, pid: int) -> None:
    connection.close()
    if pid != os.getpid():
        return
    process.kill()
    process.wait()


_children: dict[int | None, Child] = {}  # by the number of a GPU
_starting = threading.Lock()


def child(gpu: int | None = None) -> Child:
    """Gives the child of a GPU or of the CPU, and starts it if there is none, or if it has died."""
    with _starting:
        running = _children.get(gpu)
        if running is None or not running.alive:
            running = _children[gpu] = Child(_space(gpu))
        return running


def _space(gpu: int | None) -> Space:
    if gpu is None:
        return Host()
    from ._gpu import GPU

    return GPU(gpu)


_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def _forked() -> None:
    """Gives a process that was forked memory of its own: what it writes, its parent does not see."""
    global _starting
    _starting = threading.Lock()  # another thread of the parent may have had it
    descriptors: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd") if _shared else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{NAME}"):
                descriptors[os.fstat(int(name)).st_ino] = int(name)
    for chunk in list(_shared):
        chunk.part(descriptors)


os.register_at_fork(after_in_child=_forked)
