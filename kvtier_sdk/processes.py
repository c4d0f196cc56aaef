"""Descriptions of processes for error messages, read from /proc."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from glob import glob
from pathlib import Path

from kvtier_sdk.options.place import brief, one_line
from kvtier_sdk.options.secrets import without_password

_PROC = Path("/proc")
#: The state of a listening socket in /proc/net/tcp.
_LISTENS = "0A"


def describe_process(pid: int) -> str:
    """Return a process's number and, if readable, command: ``process 4711 (vllm serve llama)``."""
    name = f"process {pid}"
    with suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").strip()
        name += f" ({brief(one_line(without_password(words.decode(errors='replace'))))})"
    return name


def listener_of(host: str, port: int) -> str | None:
    """Describe the process that listens on a port; return ``None`` if it cannot be found."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:  # the host has no address, so it has no listener
        return None
    packed = socket.inet_pton(family, str(address[0]))
    # The kernel writes an address as words in this machine's byte order.
    ours = "".join(packed[at : at + 4][::-1].hex() for at in range(0, len(packed), 4)).upper()
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                theirs, _, their_port = local.partition(":")
                is_same = theirs.endswith(ours) or not (theirs.strip("0") and ours.strip("0"))
                if state == _LISTENS and is_same and int(their_port, 16) == port:
                    sockets.add(f"socket:[{rest[5]}]")
    for fd in glob(f"{_PROC}/[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(fd) in sockets:
                return describe_process(int(Path(fd).parts[2]))
    return None
