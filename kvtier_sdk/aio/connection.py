"""A network connection that moves bytes between a socket and a tier's buffers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Self

from kvtier_sdk.aio.clock import Clock, TimerHandle
from kvtier_sdk.errors import TierError, TierTimeoutError, TierUnavailableError

# The size of one read of text. It is small, because any payload in the read is copied later.
_TEXT_BYTES = 2048
# The maximum size of a TLS write. OpenSSL copies the bytes of a write, so the size is limited.
_TLS_PIECE_BYTES = 128 * 1024
# The maximum number of buffers in one call of readv or writev (IOV_MAX).
_MOST_BUFFERS = 1024
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """A network connection that sends and fills a tier's buffers without copies.

    The connection uses TCP, TLS or a Unix socket. A simple protocol needs only a few calls::

        connection = await Connection.connect(("kv-1", 7000), clock=clock, timeout_s=2.0)
        await connection.send([b"PUT 131136\\n", *transfer.buffers])
        if await connection.receive_until(b"\\n", most_bytes=100) != b"DONE\\n":
            connection.close("the server refused a PUT")

        await connection.send([b"GET\\n"])
        await connection.receive(transfer.buffers)

    A tier can rely on these rules:

    - *Cancellation.* Cancelling a call that waits closes the connection. After the cancellation,
      the connection does not touch the call's buffers.
    - *End of file, reset.* A call that needs more bytes than the server sent raises
      :class:`TierUnavailableError` and closes the connection. Bytes that the server sent
      earlier can still be received, even if a :meth:`send` was cut short.
    - *Silence.* If a call makes no progress for ``stall_timeout_s``, it raises
      :class:`TierTimeoutError` and closes the connection.
    - *One call at a time.* While a call waits, a second call raises :class:`RuntimeError`. The
      first call is not affected, so requests never mix.
    - *Closing.* A closed connection stays closed, and every later call raises the reason as a
      :class:`TierError`. After a failed call, the content of the call's buffers is undefined.

    Make all calls on one event loop. A :class:`ConnectionPool` keeps connections for reuse.

    Args:
        sock: a connected, non-blocking socket; for TLS an :class:`ssl.SSLSocket` after its
            handshake. The connection owns and closes the socket.
        peer: the server's name, for messages.
        clock: the clock for timers.
        stall_timeout_s: maximum time without progress in a call; ``None`` for no limit.
    """

    def __init__(
        self, sock: socket.socket, peer: str, clock: Clock, *, stall_timeout_s: float | None = None
    ) -> None:
        self.peer = peer
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._stall_timer: TimerHandle | None = None
        self._has_moved = False
        self._loop = asyncio.get_running_loop()
        self._stream = _TLSStream(sock) if isinstance(sock, ssl.SSLSocket) else _Stream(sock)
        self._error: TierError | None = None
        self._unread = b""  # bytes received before a call requested them
        self._text = memoryview(bytearray(_TEXT_BYTES))
        # The result of the running call: the buffers left to send or fill, or None after a failure.
        self._waiter: asyncio.Future[Sequence[Any] | None] | None = None
        self._rooms: Sequence[Any] = ()
        self._takes_some = False
        self._unsent: Sequence[Any] = ()
        self._is_cut_short = False  # true if the last send ended early
        self._is_refused = False  # true once a write to the socket has failed
        self._is_watched = True
        self._loop.add_reader(self._stream.descriptor, self._on_readable)

    @classmethod
    async def connect(
        cls,
        address: tuple[str, int] | str,
        *,
        clock: Clock,
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        stall_timeout_s: float | None = None,
    ) -> Self:
        """Connect to a server.

        Args:
            address: host and port, or the path of a Unix socket.
            clock: the clock for timers; ``stall_timeout_s`` is as for the class.
            timeout_s: the time limit for connecting, including the TLS handshake.
            tls: the context for TLS over TCP; ``None`` for plain text. If the context checks
                certificates, the server's certificate must match the host.

        Raises:
            TierTimeoutError: the time limit has passed.
            TierUnavailableError: the server cannot be reached.
            ssl.SSLError: the TLS handshake failed. A tier should report which option to change.

        After an error or a cancellation, no socket is left open.
        """
        peer = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        try:
            async with clock.timeout(timeout_s):
                sock = await _open_socket(address, tls)
        except TimeoutError:
            raise TierTimeoutError(f"no connection to {peer} within {timeout_s:g} s") from None
        except ssl.SSLError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise TierUnavailableError(f"no connection to {peer}: {reason}") from error
        return cls(sock, peer, clock, stall_timeout_s=stall_timeout_s)

    @property
    def is_usable(self) -> bool:
        """True if the connection is open and idle, with no bytes unsent or unread."""
        is_free = self._error is None and self._waiter is None
        return is_free and not self._is_cut_short and not self.has_unread

    @property
    def has_unread(self) -> bool:
        """True if the connection buffers bytes that no call has received."""
        return bool(self._unread) or (self._error is None and self._stream.has_pending())

    async def send(self, buffers: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """Send ``buffers``, one after the other; return the unsent buffers, if any.

        If the server replies or hangs up before all bytes are sent, the call returns early. The
        caller should then receive the reply, because it may explain the server's refusal. Another
        request can use the connection only after the unsent buffers are sent.
        """
        self._check()
        self._unsent = [buffer for buffer in buffers if len(buffer)]
        try:
            rest = self._unsent if self._write() else await self._wait_writable()
        finally:
            self._unsent = ()
        if self._error is not None:
            raise self._lost()
        self._is_cut_short = bool(rest)
        return rest

    async def receive(self, buffers: Sequence[memoryview]) -> None:
        """Fill writable, contiguous buffers, one after the other."""
        self._check()
        rooms = self._take_unread(buffers)
        if rooms:
            await self._fill(rooms)

    async def receive_some(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """Receive at least one byte into ``buffers``, in order; return their unfilled parts.

        One system call can fill several buffers. So if the lengths are known, pass separate buffers
        to receive a reply's head and payload together. At least one buffer must have room.
        """
        self._check()
        if self._unread:
            return self._take_unread(buffers)
        return await self._fill([buffer for buffer in buffers if len(buffer)], some=True)

    async def receive_until(self, end: bytes, *, most_bytes: int) -> bytes:
        """Receive text up to and including ``end``, such as a line end.

        A later call receives the bytes after ``end``. If the text is longer than ``most_bytes``,
        the method closes the connection and raises :class:`TierUnavailableError`.
        """
        self._check()
        start = 0
        while (at := self._unread.find(end, start, most_bytes)) < 0:
            if len(self._unread) >= most_bytes:
                self.close(f"{most_bytes} bytes of text came without their end")
                raise self._lost()
            start = max(0, len(self._unread) - len(end) + 1)
            rest = await self._fill([self._text], some=True)
            self._unread += self._text[: _TEXT_BYTES - sum(map(len, rest))]
        at += len(end)
        text, self._unread = self._unread[:at], self._unread[at:]
        return text

    def unread(self, text: bytes) -> None:
        """Put back ``text``, the last received bytes, for the next call to receive again."""
        self._unread = text + self._unread

    def close(self, reason: str) -> None:
        """Close the connection immediately. Running and later calls raise the ``reason``."""
        self._close(TierUnavailableError(f"connection to {self.peer} lost: {reason}"))

    def _close(self, error: TierError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._loop.remove_reader(self._stream.descriptor)
        self._loop.remove_writer(self._stream.descriptor)
        self._stream.close()
        self._unread = b""
        self._finish(None)

    def _lost(self) -> TierError:
        assert self._error is not None
        return type(self._error)(str(self._error))

    def _check(self) -> None:
        if self._error is not None:
            raise self._lost()
        if self._waiter is not None:
            raise RuntimeError(f"another call waits on the connection to {self.peer}")

    def _take_unread(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        rooms: Sequence[memoryview] = [buffer for buffer in buffers if len(buffer)]
        while rooms and self._unread:
            count_bytes = min(len(rooms[0]), len(self._unread))
            rooms[0][:count_bytes] = self._unread[:count_bytes]
            self._unread = self._unread[count_bytes:]
            rooms = _rest_of(rooms, count_bytes)
        return rooms

    async def _fill(self, rooms: Sequence[Any], *, some: bool = False) -> Sequence[Any]:
        """Fill all of ``rooms``, or a part if ``some`` is true; return the unfilled parts."""
        if self._error is not None:
            raise self._lost()
        self._rooms = rooms
        self._takes_some = some
        try:
            # Read first, because the event loop may have reported the bytes before this call.
            if self._read():
                if self._error is not None:
                    raise self._lost()
                return self._rooms
            if not self._is_watched:
                self._is_watched = True
                self._loop.add_reader(self._stream.descriptor, self._on_readable)
            return await self._wait()
        finally:
            self._rooms = ()

    async def _wait_writable(self) -> Sequence[Any]:
        descriptor = self._stream.descriptor
        self._loop.add_writer(descriptor, self._on_writable)
        try:
            return await self._wait()
        finally:
            if self._error is None:
                self._loop.remove_writer(descriptor)

    async def _wait(self) -> Sequence[Any]:
        self._waiter = self._loop.create_future()
        if self._stall_timeout_s is not None:
            self._has_moved = True
            self._check_for_stall(self._stall_timeout_s)
        try:
            rest = await self._waiter
        except BaseException:
            self.close("a call on it was cancelled")
            raise
        finally:
            self._waiter = None
            if self._stall_timer is not None:
                self._stall_timer.cancel()
        if rest is None:
            raise self._lost()
        return rest

    def _check_for_stall(self, timeout_s: float) -> None:
        if not self._has_moved:
            what = f"connection to {self.peer} lost: nothing moved for {timeout_s:g} s"
            self._close(TierTimeoutError(what))
            return
        self._has_moved = False
        due_s = self._clock.now_s() + timeout_s
        self._stall_timer = self._clock.call_at(due_s, self._check_for_stall, timeout_s)

    # The loop's callbacks, and methods that callbacks and calls share. These methods must not
    # raise, because the running call would never end after an exception in a callback.

    def _on_readable(self) -> None:
        if self._rooms:
            if self._read():
                self._finish(self._rooms)
            return
        # No call waits for these bytes. Read the first bytes, and leave the rest for a later call.
        if not self._unread:
            count_bytes = self._read_into([self._text])
            self._unread = bytes(self._text[:count_bytes])
            if count_bytes:
                # Stop a running send, because the server may have refused the request.
                self._finish(self._unsent)
        elif self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._stream.descriptor)

    def _on_writable(self) -> None:
        if self._write():
            self._finish(self._unsent)

    def _finish(self, rest: Sequence[Any] | None) -> None:
        """End the running call, so that later callbacks do not use its buffers."""
        self._rooms = self._unsent = ()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(rest)

    def _read(self) -> bool:
        """Fill buffers with the available bytes; return true if the call has ended or failed."""
        while self._rooms:
            count_bytes = self._read_into(self._rooms)
            if not count_bytes:
                return self._error is not None
            self._rooms = _rest_of(self._rooms, count_bytes)
            if self._takes_some:
                break
        return True

    def _read_into(self, rooms: Sequence[Any]) -> int:
        """Read once; return 0 if no bytes are available or the connection has ended."""
        try:
            count_bytes = self._stream.read(rooms)
        except _NOT_NOW:
            return 0
        except OSError as error:
            self.close(error.strerror or str(error))
            return 0
        if count_bytes:
            self._has_moved = True
        else:
            self.close("closed by the server")
        return count_bytes

    def _write(self) -> bool:
        """Send bytes until the socket is full; return true if the call has ended."""
        while self._unsent:
            try:
                count_bytes = self._stream.write(self._unsent)
            except _NOT_NOW:
                return bool(self._unread)
            except OSError as error:
                if self._is_refused:
                    self.close(error.strerror or str(error))
                # Keep the connection open for now, because an unread reply may contain the reason.
                self._is_refused = True
                return True
            self._has_moved = True
            self._unsent = _rest_of(self._unsent, count_bytes)
        return True


class _Stream:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.descriptor = sock.fileno()

    def has_pending(self) -> bool:
        return False

    def read(self, rooms: Sequence[Any]) -> int:
        return os.readv(self.descriptor, rooms[:_MOST_BUFFERS])

    def write(self, views: Sequence[Any]) -> int:
        return os.writev(self.descriptor, views[:_MOST_BUFFERS])

    def close(self) -> None:
        self._socket.close()


class _TLSStream(_Stream):
    _socket: ssl.SSLSocket

    def has_pending(self) -> bool:
        return self._socket.pending() > 0

    def read(self, rooms: Sequence[Any]) -> int:
        return self._socket.recv_into(rooms[0])

    def write(self, views: Sequence[Any]) -> int:
        return self._socket.send(views[0][:_TLS_PIECE_BYTES])


def _rest_of(views: Sequence[Any], count_bytes: int) -> Sequence[Any]:
    for index, view in enumerate(views):
        if count_bytes < len(view):
            return [view[count_bytes:], *views[index + 1 :]]
        count_bytes -= len(view)
    return ()


async def _open_socket(address: tuple[str, int] | str, tls: ssl.SSLContext | None) -> socket.socket:
    if isinstance(address, str):
        return await _connected(socket.AF_UNIX, address)
    host, port = address
    loop = asyncio.get_running_loop()
    failure = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, *_, place in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            sock = await _connected(family, place)
        except OSError as error:
            failure = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Keep-alive detects a server that has vanished silently, even without a stall timeout.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock if tls is None else await _encrypted(sock, tls, host)
    raise failure


async def _connected(family: int, place: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, place)
    except BaseException:
        sock.close()
        raise
    return sock


async def _encrypted(plain: socket.socket, tls: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """Perform the TLS handshake; return a socket that replaces the plain socket."""
    loop = asyncio.get_running_loop()
    sock = tls.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    try:
        while True:
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                await _until(loop.add_reader, loop.remove_reader, sock.fileno())
            except ssl.SSLWantWriteError:
                await _until(loop.add_writer, loop.remove_writer, sock.fileno())
            else:
                return sock
    except BaseException:
        sock.close()
        raise


async def _until(
    watch: Callable[..., object], unwatch: Callable[[int], object], descriptor: int
) -> None:
    called = asyncio.Event()
    watch(descriptor, called.set)
    try:
        await called.wait()
    finally:
        unwatch(descriptor)
