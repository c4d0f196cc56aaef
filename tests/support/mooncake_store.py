"""A real Mooncake Store on the loopback: a master, and nodes that provide the memory."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from support.server import ServerError, ServerProcess, free_port

#: A node's program, which calls a Mooncake method for each input line and prints the result.
_NODE = """
import ast, os, sys
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, segment_bytes = sys.argv[1:]
status = store.setup(
    "127.0.0.1", "P2PHANDSHAKE", int(segment_bytes), 16 << 20, "tcp", "", master
)
print(repr(status), file=results, flush=True)
for line in sys.stdin:
    method, *arguments = ast.literal_eval(line)
    print(repr(getattr(store, method)(*arguments)), file=results, flush=True)
"""


class MooncakeStore(ServerProcess):
    """A master and its nodes. :meth:`pause` freezes only the master."""

    def __init__(self, directory: Path, *options: str, segment_bytes: int = 256 * 2**20) -> None:
        super().__init__(directory / "log")
        self._options = options
        self._segment_bytes = segment_bytes
        self.port, self._metrics_port = free_port(), free_port()
        self.nodes: list[Node] = []

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start(self, nodes: int = 1) -> MooncakeStore:
        self.start_master()
        for _ in range(nodes):
            self.add_node()
        return self

    def start_master(self) -> None:
        """Start an empty master, and wait until all nodes have joined it."""
        program = shutil.which(
            "mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        )
        if program is None:
            raise ServerError("mooncake_master is missing: try 'make setup'")
        command = [program, "-rpc_address=127.0.0.1", f"-rpc_port={self.port}"]
        command += ["-metrics_host=127.0.0.1", f"-metrics_port={self._metrics_port}"]
        self.launch(*command, *self._options)
        self.wait_until(self._answers, "the master answers")
        for node in self.nodes:
            self.wait_until(lambda node=node: node.ask("put", "x", b"x") == 0, "a node is back")

    def add_node(self) -> Node:
        node = Node(f"127.0.0.1:{self.port}", self._segment_bytes, self.log)
        self.nodes.append(node)
        return node

    def kill_master(self) -> None:
        super().kill()

    def kill(self) -> None:
        while self.nodes:
            self.nodes.pop().kill()
        self.kill_master()

    def names(self) -> list[str]:
        url = f"http://127.0.0.1:{self._metrics_port}/get_all_keys"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return [name for name in reply.read().decode().split() if name.startswith("kvtier/")]

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Node:
    def __init__(self, master: str, segment_bytes: int, log: Path) -> None:
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _NODE, master, str(segment_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        if self._result() != "0":
            self.kill()
            raise ServerError(f"a node does not start\n{log.read_text()}")

    def ask(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{(method, *arguments)!r}\n")
        self._process.stdin.flush()
        return ast.literal_eval(self._result())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _result(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
