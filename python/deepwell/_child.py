"""The process that runs optimized modules, and the memory that it shares with this one.

There is one child for all modules of this process. It is started when the first is called, and ends
with this process, however that ends: its standard input is a socket, which then ends.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import weakref
from typing import Any

from ._program import Error, find

ALIGNMENT = 64  # bytes, at which the engine uses memory where it is
VERSION = 1  # of the protocol
# Bytes of free blocks that are kept, beside as many as are in use.
KEPT = 256 << 20

Place = tuple[int, int]  # a block, and an offset in bytes


class Memory:
    """A block of shared memory that is in use. It returns to the child's pool when raw dies."""

    def __init__(self, block: int, raw: Any) -> None:
        self.block = block
        self.raw = raw  # a ctypes array, which tensors keep alive


class _Block:
    def __init__(self, number: int, size: int, view: mmap.mmap) -> None:
        self.number = number
        self.size = size
        self.view = view


class Child:
    """A running engine."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.compiles = 0
        self.live = 0  # calls whose backward pass may be asked for, as the child last said
        # From finalizers: calls, and programs.
        self.freed: collections.deque[int] = collections.deque()
        self.closed: collections.deque[int] = collections.deque()
        self._dead: Error | None = None
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._blocks = itertools.count(1)
        self._received = bytearray()
        self._stale: dict[int, object] = {}  # interrupted requests, with what they still write to
        self._used = 0
        self._idle: collections.OrderedDict[int, _Block] = collections.OrderedDict()
        self._returned: collections.deque[_Block] = collections.deque()  # from finalizers
        self._unmap: list[int] = []
        self._homes: list[tuple[int, int, int, weakref.ref[Any]]] = []
        self._log = tempfile.TemporaryFile(prefix="deepwell-")
        self._socket, theirs = socket.socketpair()
        # Its own process group: Ctrl-C reaches this process only.
        with theirs:
            self._process = subprocess.Popen([find(), "__call"], stdin=theirs.fileno(), stdout=self._log,
                                             stderr=self._log, process_group=0)
        self._end = weakref.finalize(self, _end, self._process, self._socket)
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
        if self.pid != os.getpid():
            raise Error("", "the engine belongs to the process that started it",
                        fix="call the module there; workers of a DataLoader prepare batches only")
        with self._lock:
            if self._dead is not None:
                raise self._dead
            if self.closed:
                self.request("close", program=self.closed.popleft())
            number = next(self._numbers)
            message = {"n": number, "do": do, **fields}
            if self.freed:
                message["free"] = [self.freed.popleft() for _ in range(len(self.freed))]
            if self._unmap:
                message["unmap"], self._unmap = self._unmap, []
            body = json.dumps(message, separators=(",", ":")).encode()
            try:
                self._send(struct.pack("<I", len(body)) + body, descriptor)
            except OSError:
                raise self._ended() from None
            except BaseException:  # nobody knows how much was sent
                self._process.kill()
                raise
            self._stale[number] = hold
            while True:
                answer = self._receive()
                self._stale.pop(answer["n"], None)
                if answer["n"] == number:
                    break
            self.live = answer["live"]
        if failed := answer.get("error"):
            raise Error(**{k: v for k, v in failed.items()
                           if k in ("code", "what", "where", "cause", "fix", "exit")})
        return answer

    def _send(self, data: bytes, descriptor: int | None) -> None:
        if descriptor is not None:
            sent = socket.send_fds(self._socket, [data], [descriptor])
            data = data[sent:]
        self._socket.sendall(data)

    def _receive(self) -> dict[str, Any]:
        """Reads one message. What an interrupt leaves unread is read the next time."""
        while True:
            have = len(self._received)
            size = struct.unpack_from("<I", self._received)[0] if have >= 4 else 0
            if have >= 4 and have >= 4 + size:
                body = bytes(self._received[4:4 + size])
                del self._received[:4 + size]
                answer: dict[str, Any] = json.loads(body)
                return answer
            try:
                more = self._socket.recv(1 << 20)
            except OSError:
                more = b""
            if not more:
                raise self._ended()
            self._received += more

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
                self._unmap.append(old.number)
        raw = (ctypes.c_char * block.size).from_buffer(block.view)
        weakref.finalize(raw, self._returned.append, block).atexit = False
        return Memory(block.number, raw)

    def settle(self, memory: Memory) -> None:
        """Remembers that a block holds parameters, which others may use where they are."""
        start = ctypes.addressof(memory.raw)
        self._homes.append((start, start + len(memory.raw), memory.block, weakref.ref(memory.raw)))

    def locate(self, address: int, size: int) -> Place | None:
        """Finds memory among the blocks that hold parameters."""
        self._homes = [h for h in self._homes if h[3]() is not None]
        for start, end, block, _ in self._homes:
            if start <= address and address + size <= end:
                return block, address - start
        return None

    def _new(self, size: int) -> _Block:
        number = next(self._blocks)
        descriptor = os.memfd_create("deepwell", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            view = mmap.mmap(descriptor, size)
            self.request("map", block=number, size=size, descriptor=descriptor)
        finally:
            os.close(descriptor)
        return _Block(number, size, view)


def _rounded(size: int) -> int:
    """Gives one of few sizes, at most an eighth larger, so that blocks can be used again."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return max(1, -(-size // step)) * step


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


_child: Child | None = None
_starting = threading.Lock()


def child() -> Child:
    """Gives the child, and starts it if there is none, or if it has died."""
    global _child
    with _starting:
        if _child is None or not _child.alive:
            _child = Child()
        return _child
