"""Blocking calls in threads: the cost that remains without a client."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


def in_threads(
    lane: Callable[[list[list[memoryview]]], None], lanes: Sequence[list[list[memoryview]]]
) -> None:
    """Call in one thread for each lane, each with its own slots."""
    with ThreadPoolExecutor(len(lanes)) as threads:
        list(threads.map(lane, lanes))


def send_all(sock: socket.socket, views: Sequence[bytes | memoryview]) -> None:
    """Send buffers one after the other, in one call where the system takes them all."""
    sent_bytes = sock.sendmsg(views)
    for view in views:
        if sent_bytes < len(view):
            sock.sendall(view[sent_bytes:])
        sent_bytes = max(0, sent_bytes - len(view))


def fill(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill buffers one after the other, in one call where the system fills them all."""
    received_bytes, *_ = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)
    for view in views:
        rest = view[received_bytes:]
        received_bytes = max(0, received_bytes - len(view))
        while rest:
            count_bytes = sock.recv_into(rest, 0, socket.MSG_WAITALL)
            if not count_bytes:
                raise SystemExit("failed: the server closed the connection")
            rest = rest[count_bytes:]
