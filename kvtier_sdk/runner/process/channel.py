"""One end of a socket that carries messages, and never waits."""

from __future__ import annotations

import contextlib
import select
import socket

from kvtier_sdk.runner.process.codec import Kind, MessageSplitter

_READ_BYTES = 1 << 16
#: With so much unsent the peer is taken to be stuck.
_MAX_UNSENT_BYTES = 8 << 20


class Channel:
    """Writes and reads messages without a wait and without an event loop. For one thread.

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
        """Write messages, behind those that are unsent. For a broken peer they are lost."""
        if self._unsent:
            self._unsent += data
            self.flush()
        elif (count := self._send(data)) < len(data):
            self._unsent += data[count:]

    def flush(self) -> None:
        """Send what was left unsent, as far as the socket accepts it."""
        if self._unsent:
            del self._unsent[: self._send(self._unsent)]

    def read(self) -> list[tuple[Kind, bytes]]:
        """Read everything that has arrived.

        Raises:
            MessageError: something else has arrived.
        """
        messages: list[tuple[Kind, bytes]] = []
        # A read in vain ends in an exception, which takes the engine several times as long.
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
                break  # no more was there; asking again would cost the engine a system call
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
        """Send what the socket accepts and return the count; a broken peer counts as all sent."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)
