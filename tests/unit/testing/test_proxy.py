"""``TcpProxy`` passes bytes on until it is cut or frozen."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TypeAlias

import pytest

from kvtier_sdk.testing import TcpProxy

Connect: TypeAlias = Callable[[TcpProxy], socket.socket]


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[int]:
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def connected() -> Iterator[Connect]:
    with ExitStack() as clients:

        def connect(proxy: TcpProxy) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", proxy.port), timeout=30)
            return clients.enter_context(client)

        yield connect


def answers(client: socket.socket, data: bytes) -> bool:
    """Return true if the data comes back, and false if the connection is lost."""
    try:
        client.sendall(data)
        return client.makefile("rb").read(len(data)) == data
    except ConnectionError:
        return False


def serves(proxy: TcpProxy, connected: Connect) -> bool:
    with suppress(ConnectionError):
        return answers(connected(proxy), b"x")
    return False


def test_all_connections_are_cut_and_new_ones_refused_until_it_is_restored(
    echo: int, connected: Connect
) -> None:
    data = bytes(range(256)) * 4096
    with TcpProxy("127.0.0.1", echo) as proxy:
        first, second = connected(proxy), connected(proxy)
        assert answers(first, data)
        assert answers(second, data)
        proxy.cut()
        assert not answers(first, data)
        assert not answers(second, data)
        assert not serves(proxy, connected)
        proxy.restore()
        assert serves(proxy, connected)
        assert not answers(first, b"x")


def test_frozen_bytes_arrive_when_it_is_unfrozen(echo: int, connected: Connect) -> None:
    with TcpProxy("127.0.0.1", echo) as proxy:
        clients = [connected(proxy)]
        assert answers(clients[0], b"before")
        proxy.freeze()
        clients.append(connected(proxy))
        for client in clients:
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                answers(client, b"held")
        proxy.unfreeze()
        for client in clients:
            client.settimeout(30)
            assert client.recv(4, socket.MSG_WAITALL) == b"held"


def test_a_store_out_of_reach_is_a_lost_connection_and_so_is_a_closed_proxy(
    echo: int, connected: Connect
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with TcpProxy("127.0.0.1", port) as proxy:
        assert not serves(proxy, connected)
    proxy = TcpProxy("127.0.0.1", echo)
    client = connected(proxy)
    assert answers(client, b"x")
    proxy.close()
    proxy.close()
    assert not answers(client, b"x")
    assert not serves(proxy, connected)
