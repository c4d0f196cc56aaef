"""A TCP proxy whose connections can be cut or frozen, for tests of outages."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_PIECE_BYTES = 1 << 16
# With this socket option, closing a socket resets its connection.
_NO_LINGER = struct.pack("ii", 1, 0)


class TcpProxy(contextlib.AbstractContextManager["TcpProxy"]):
    """A TCP proxy on a free loopback port, in front of a store at ``host`` and ``port``.

    Its threads pass bytes on until :meth:`cut` simulates an outage or :meth:`freeze` a hang. Any
    thread may call its methods, with or without an event loop. TLS works only if the client
    expects the store's certificate at the proxy's address.

    Example::

        with TcpProxy("127.0.0.1", 6379) as proxy:
            tier = f"redis://127.0.0.1:{proxy.port}"

    Attributes:
        port: the proxy's port on 127.0.0.1.
    """

    def __init__(self, host: str, port: int) -> None:
        self._store = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._is_cut = self._is_closed = False
        self._sockets: set[socket.socket] = set()
        self._is_thawed = threading.Event()
        self._is_thawed.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and reset new ones until :meth:`restore` is called."""
        with self._lock:
            self._is_cut = True
            for sock in self._sockets:
                _end(sock)

    def restore(self) -> None:
        """Accept connections again."""
        self._is_cut = False

    def freeze(self) -> None:
        """Pass on no bytes until :meth:`unfreeze`; connections stay open, and new ones are made."""
        self._is_thawed.clear()

    def unfreeze(self) -> None:
        """Pass on the bytes that have arrived during the freeze, and all later bytes."""
        self._is_thawed.set()

    def close(self) -> None:
        """End the proxy and its connections; a second call does nothing."""
        self._is_closed = True
        _end(self._listener)
        self._listener.close()
        self.cut()
        self.unfreeze()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError):  # the client has gone, or the listener is closed
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        with client:
            try:
                store = socket.create_connection(self._store)
            except OSError:
                return
            with store:
                pair = {client, store}
                with self._lock:
                    if self._is_cut:
                        return
                    self._sockets |= pair
                answers = threading.Thread(target=self._pass, args=(store, client), daemon=True)
                answers.start()
                self._pass(client, store)
                answers.join()
                with self._lock:
                    self._sockets -= pair

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                self._is_thawed.wait()
                sink.sendall(piece)
        # End both directions, because no store's protocol uses a half-closed connection.
        _end(source)
        _end(sink)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)
