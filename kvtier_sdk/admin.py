"""The admin socket of an engine. Each connection carries one JSON request and its answer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pwd
import socket
import socketserver
import stat
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier_sdk.config.tiering_config import own_directory
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.processes import describe_process

# Large enough for a request that names all chunks of a prompt of several million tokens.
_MOST_REQUEST_BYTES = 16 * 2**20
_PROBE_S = 2.0
#: ``struct ucred``, the value of SO_PEERCRED: the peer's process, user and group ids.
_PEER = struct.Struct("3i")

_log = logging.getLogger("kvtier.admin")

#: A function that answers a request; the second argument describes the caller in words.
Answer = Callable[[Mapping[str, Any], str], Mapping[str, Any]]


class AdminSocket(socketserver.UnixStreamServer):
    """A Unix socket that a separate thread serves, one client at a time."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = path / f"kvtier-{os.getpid()}.sock" if path.is_dir() else path
        self._answer = answer
        try:
            super().__init__(str(self.path), _Client)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"option 'admin_socket': {self.path}: {reason}") from None
        self._thread = threading.Thread(target=self.serve_forever, name="kvtier-admin", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the socket and end the thread; a second call does nothing."""
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                self.path.unlink()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def server_bind(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise ConfigError(
                    f"option 'admin_socket': {self.path} exists and is not a socket; name another "
                    "path"
                )
            if (pid := server_of(self.path)) is not None:
                raise ConfigError(
                    f"option 'admin_socket': {describe_process(pid)} serves {self.path}; where "
                    "several engines have the same setting, name a directory"
                )
            self.path.unlink()
        # On Linux, bind gives the file the socket's mode. A chmod of the path is unsafe, because
        # anyone who can write to the directory could replace the file first.
        os.fchmod(self.fileno(), 0o600)
        super().server_bind()
        self._inode = os.lstat(self.path).st_ino

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that disconnected or timed out."""

    def reply(self, line: bytes, caller: str) -> bytes:
        answer: Mapping[str, Any]
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise ValueError("should be an object")
        except (ValueError, RecursionError) as error:
            answer = {"error": f"the request is not JSON: {error}"}
        else:
            try:
                answer = self._answer(request, caller)
            except ConfigError as error:
                answer = {"error": str(error)}
            except Exception as error:
                _log.exception("the admin socket cannot answer")
                answer = {"error": f"{type(error).__name__}: {error}"}
        return json.dumps(answer).encode() + b"\n"


class _Client(socketserver.StreamRequestHandler):
    # The server handles one client at a time, so a silent client would block the others.
    timeout = 2.0
    server: AdminSocket

    def handle(self) -> None:
        pid, uid = _peer_of(self.connection)
        user = str(uid)
        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(uid).pw_name
        line = self.rfile.readline(_MOST_REQUEST_BYTES)
        self.wfile.write(self.server.reply(line, f"{user} (uid {uid}, pid {pid})"))


def make_directory(path: Path) -> None:
    """If ``path`` is this user's default directory, create it and check that it is private."""
    if path == own_directory():
        found = None
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            # Check the directory, because another user may have created it, or a link in its place.
            found = path.lstat()
        if not found or (found.st_uid, found.st_mode) != (os.geteuid(), stat.S_IFDIR | 0o700):
            raise ConfigError(
                f"option 'admin_socket': {path} is not a directory that only this user can enter; "
                "remove it, or name another path"
            )


def server_of(path: Path) -> int | None:
    """Return the id of the process that serves a socket, or ``None`` if the socket is unused."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return None
        return _peer_of(probe)[0]


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the client."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(peer)
    return pid, uid
