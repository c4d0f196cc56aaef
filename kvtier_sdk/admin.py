"""The admin socket of an engine. Each connection carries one JSON request and its answer.

This module only transports requests and answers; ``operator.services`` defines them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.errors import ConfigError

#: Time limit of one client. Clients are served one by one, so a slow client delays the others.
_CLIENT_TIMEOUT_S = 2.0
_MOST_REQUEST_BYTES = 64 * 1024
_MOST_ANSWER_BYTES = 16 * 1024 * 1024
_PAUSE_S = 0.1

_log = logging.getLogger("kvtier.admin")


class AdminSocket:
    """A Unix socket that a separate thread serves, one client at a time.

    The socket has mode 0600: only the engine's user and root can connect. A socket left by a dead
    process is replaced.
    """

    def __init__(
        self, path: Path, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> None:
        self.path = path / f"kvtier-{os.getpid()}.sock" if path.is_dir() else path
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._bind()
        except OSError as error:
            self._socket.close()
            reason = error.strerror or str(error)
            raise ConfigError(f"option 'admin_socket': {self.path}: {reason}") from None
        except ConfigError:
            self._socket.close()
            raise
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvtier-admin", daemon=True)
        self._thread.start()
        _log.info("admin socket: %s", self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the socket and end the thread; a second call does nothing."""
        self._closed.set()
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                self.path.unlink()
        with contextlib.suppress(OSError):
            # Shut the socket down first, because a close alone would not wake the thread.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLIENT_TIMEOUT_S)
        self._socket.close()

    def _bind(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise ConfigError(
                    f"option 'admin_socket': {self.path} exists and is not a socket; name another "
                    "path"
                )
            if _is_served(self.path):
                raise ConfigError(
                    f"option 'admin_socket': a living process serves {self.path}; where several "
                    "engines have the same setting, name a directory"
                )
            self.path.unlink()
        # On Linux, bind gives the file the socket's mode. A chmod of the path is unsafe, because
        # anyone who can write to the directory could replace the file first.
        os.fchmod(self._socket.fileno(), 0o600)
        self._socket.bind(str(self.path))
        self._inode = os.lstat(self.path).st_ino
        self._socket.listen()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                # The process may be out of descriptors, so pause. A call of close() ends the pause.
                self._closed.wait(_PAUSE_S)
                continue
            with client, contextlib.suppress(OSError):
                line = _receive_line(client, _MOST_REQUEST_BYTES, _CLIENT_TIMEOUT_S)
                client.sendall(self._reply(line))

    def _reply(self, line: bytes) -> bytes:
        answer: Mapping[str, Any]
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise ValueError("should be an object")
        except (ValueError, RecursionError) as error:
            answer = {"error": f"the request is not JSON: {error}"}
        else:
            try:
                answer = self._answer(request)
            except Exception as error:
                _log.exception("the admin socket cannot answer")
                answer = {"error": f"{type(error).__name__}: {error}"}
        return json.dumps(answer).encode() + b"\n"


def ask(path: Path, request: Mapping[str, Any], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Send a request and return the answer. Raise :class:`OSError` if no answer comes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout_s)
        client.connect(str(path))
        client.sendall(json.dumps(request).encode() + b"\n")
        line = _receive_line(client, _MOST_ANSWER_BYTES, timeout_s)
    if not line:
        raise ConnectionResetError("the engine has closed the connection")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CLIENT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def _receive_line(connection: socket.socket, most_bytes: int, timeout_s: float) -> bytes:
    clock = SystemClock()
    deadline_s = clock.now_s() + timeout_s
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= most_bytes:
        left_s = deadline_s - clock.now_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        data = connection.recv(65536)
        if not data:
            break
        line += data
    return bytes(line)
