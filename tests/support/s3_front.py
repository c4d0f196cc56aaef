"""A proxy that makes requests to ``rclone serve s3`` atomic, as requests to S3 are.

S3 shows an object only when it has arrived whole, and the last of two writers wins. ``rclone serve
s3`` writes an object's file while the request arrives, and answers a second writer with an error.
The proxy, a separate process, reads each request to its end, and forwards requests one by one.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "expect"}


class S3Front:
    def __init__(self, server_port: int) -> None:
        command = [sys.executable, __file__, str(server_port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def __enter__(self) -> S3Front:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.communicate()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_port: ClassVar[int]
    one_by_one: ClassVar[threading.Lock] = threading.Lock()

    def _pass_on(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return
        try:
            with self.one_by_one:
                answer, content = self._ask(body)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        told = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", told or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815  # as http.server asks

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=30)
        try:
            # Keep the client's Host header, because the request's signature covers the header.
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    connection.putheader(name, value)
            if "Content-Length" in self.headers:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def log_message(self, *_: Any) -> None: ...


def main() -> None:
    _Handler.server_port = int(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
