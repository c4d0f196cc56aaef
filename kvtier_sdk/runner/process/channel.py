"""The engine's end of the socket to a tier's process."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import Callable

from kvtier_sdk.runner.process.codec import Kind, MessageSplitter

_READ_BYTES = 1 << 16
#: A process that leaves so much unread gets no more.
_MAX_UNREAD_BYTES = 8 << 20


class Channel:
    """Writes and reads messages without a wait, and without the loop where that is possible.

    What goes through the loop wakes its thread up, which then competes with the engine's for the
    interpreter lock. So :meth:`write` is for any thread, and leaves to the loop only what the
    socket does not take at once; :meth:`read` is for one thread at a time.

    Attributes:
        at_end: whether nothing more is to be read.
        is_closed: whether nothing is read or written any more.

    Args:
        own: a connected socket, which is the link's from now on.
        event_loop: takes care of what has to wait.
    """

    def __init__(self, own: socket.socket, event_loop: asyncio.AbstractEventLoop) -> None:
        own.setblocking(False)
        self.at_end = False
        self._socket = own
        self._readable = select.poll()
        self._readable.register(own, select.POLLIN)
        self._event_loop = event_loop
        self._splitter = MessageSplitter()
        self._arrived = memoryview(bytearray(_READ_BYTES))
        self._writing = threading.Lock()
        self._unwritten = bytearray()
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether the other side has left so much unread that it should get no more."""
        return len(self._unwritten) > _MAX_UNREAD_BYTES

    def write(self, data: bytes) -> None:
        """Write messages, behind those that wait. For a link that is closed they are lost."""
        with self._writing:
            if self.is_closed:
                return
            if self._unwritten:
                self._unwritten += data
                return
            self._unwritten += data[self._send(data) :]
            if self._unwritten:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    self._event_loop.call_soon_threadsafe(self._write_when_possible)

    def read(self) -> list[tuple[Kind, bytes]]:
        """Read what is there, to its end: uvloop lets go of a socket that was reset, unread or not.

        Returns:
            Each message that is whole now.

        Raises:
            MessageError: something else was there.
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
        return messages

    def attend(self, arrived: Callable[[], object]) -> None:
        """Have the loop call ``arrived`` whenever there is something to read. On the loop."""
        if not self.at_end:
            self._event_loop.add_reader(self._socket.fileno(), arrived)

    def ignore(self) -> None:
        """Leave it unread until somebody looks. On the loop."""
        if not self.is_closed:
            self._event_loop.remove_reader(self._socket.fileno())

    def close(self) -> None:
        """Close the socket, at once. On the loop, while nobody reads."""
        with self._writing:
            if self.is_closed:
                return
            self._event_loop.remove_reader(self._socket.fileno())
            self._event_loop.remove_writer(self._socket.fileno())
            self.is_closed = self.at_end = True
            self._unwritten.clear()
            self._socket.close()

    def _send(self, data: bytes | bytearray) -> int:
        """Write what the socket takes; how much that is. What nobody reads any more is taken."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    def _write_when_possible(self) -> None:
        if not self.is_closed:
            self._event_loop.add_writer(self._socket.fileno(), self._write_rest)

    def _write_rest(self) -> None:
        with self._writing:
            del self._unwritten[: self._send(self._unwritten)]
            if not self._unwritten:
                self._event_loop.remove_writer(self._socket.fileno())
