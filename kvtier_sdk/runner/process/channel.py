"""One end of a socket that carries messages, and never waits."""

from __future__ import annotations

import contextlib
import select
import socket

from kvtier_sdk.runner.process.codec import Kind, MessageSplitter

_READ_BYTES = 1 << 16
#: With more than this unsent, the peer is assumed to be stuck.
_MAX_UNSENT_BYTES = 8 << 20


class Channel:
    """Writes and reads messages without waiting and without an event loop. For one thread.

    Attributes:
        at_end: true once the peer has closed its end, or the connection is broken.
    """

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self.at_end = False
        self._socket = own
        self._readable = select.poll()
        self._readable.register(own, select.POLLIN)
        self._splitter = MessageSplitter()
        self._arrived = memoryview(bytearray(_READ_BYTES))
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """True if the socket has not accepted everything that was written."""
        return bool(self._unsent)

    @property
    def is_full(self) -> bool:
        """True if the peer has left so much unread that it should get no more."""
        return len(self._unsent) > _MAX_UNSENT_BYTES

    def write(self, data: bytes) -> None:
        """Write messages after earlier unsent ones. If the peer is broken, they are lost."""
        if self._unsent:
            self._unsent += data
            self.flush()
        elif (count := self._send(data)) < len(data):
            self._unsent += data[count:]

    def flush(self) -> None:
        """Send as much of the unsent data as the socket accepts."""
        if self._unsent:
            del self._unsent[: self._send(self._unsent)]

    def read(self) -> list[tuple[Kind, bytes]]:
        """Read everything that has arrived.

        Raises:
            MessageError: the data is not a valid message.
        """
        messages: list[tuple[Kind, bytes]] = []
        # Poll first: a read without data raises an exception, which costs several times as much.
        while not self.at_end and self._readable.poll(0):
            try:
                count = self._socket.recv_into(self._arrived)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                count = 0
            if count == 0:
                self.at_end = True
            messages += self._splitter.split(self._arrived[:count])
            if count < _READ_BYTES:
                break  # nothing more was there; another read would cost a system call
        return messages

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is sent, or the peer is broken or takes too long."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(OSError):
            self._socket.sendall(self._unsent)

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        self.at_end = True
        self._unsent.clear()
        self._socket.close()

    def _send(self, data: bytes | bytearray) -> int:
        """Send as much as the socket accepts; return the count, or everything for a broken peer."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)
