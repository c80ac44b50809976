"""Messages to and from a child over a socket, which stay whole if an exception interrupts anything.

A signal's handler may raise between any two instructions of Python: after bytes were sent, and
before anybody has stored how many. So what is sent and received is counted inside of one call of
C, `list.extend(map(…))`: the system's call either has moved nothing, or its result is in the list.
"""

from __future__ import annotations

import array
import functools
import json
import socket
import struct
from typing import Any


class _Outgoing:
    """A message, and how much of it was sent."""

    def __init__(self, message: dict[str, Any], descriptor: int | None) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        self.message = message
        self.data = struct.pack("<I", len(body)) + body
        self.descriptor = descriptor  # goes with the first byte
        self.parts: list[int] = []  # bytes that each call has sent

    @property
    def sent(self) -> int:
        return sum(self.parts)


class Connection:
    """One end of a socket. Only one thread at a time uses it."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._outgoing: _Outgoing | None = None
        self._parts: list[bytes] = []  # received, and not yet taken

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Sends a message, after what is left of an interrupted one."""
        outgoing = _Outgoing(message, descriptor)
        self._flush()
        self._outgoing = outgoing
        self._flush()

    def begun(self, message: dict[str, Any]) -> bool:
        """Says of a message whose sending was interrupted whether the other end will receive it.

        If none of it was sent, it is taken back.
        """
        last = self._outgoing
        if last is None or last.message is not message:
            return False
        if last.sent == 0:
            self._outgoing = None
            return False
        return True

    def _flush(self) -> None:
        if (message := self._outgoing) is None:
            return
        while (at := message.sent) < len(message.data):
            rest = memoryview(message.data)[at:]
            if at == 0 and message.descriptor is not None:
                rights = array.array("i", [message.descriptor])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                call: Any = functools.partial(self.socket.sendmsg, [rest], ancillary)
                message.parts.extend(map(call, (0,)))
            else:
                message.parts.extend(map(self.socket.send, (rest,)))

    def receive(self) -> dict[str, Any] | None:
        """Gives the next message, or None if the other end has closed."""
        while True:
            data = b"".join(self._parts)
            size = 4 + struct.unpack_from("<I", data)[0] if len(data) >= 4 else 4
            if len(data) > 4 and len(data) >= size:
                answer: dict[str, Any] = json.loads(data[4:size])
                self._parts = [data[size:]]  # until here, another call would read it again
                return answer
            self._parts.extend(map(self.socket.recv, (1 << 20,)))
            if not self._parts[-1]:
                return None
