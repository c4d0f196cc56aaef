"""Azurite, Microsoft's emulator of Azure Blob Storage, on a free port of the loopback."""

from __future__ import annotations

import base64
import hmac
import http.client
import shutil
import socket
import subprocess
import time
from email.utils import formatdate
from pathlib import Path

from obstore.store import AzureStore

#: The account that every Azurite has, and its published key.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "chunks"
_VERSION = "2021-08-06"
_START_S = 30.0


class Azurite:
    """Azurite with a container ``chunks``; a context manager. Its chunks outlive :meth:`kill`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def program() -> str | None:
        """Return the path of ``azurite-blob``; ``make azurite`` installs it."""
        ours = Path(__file__).parents[2] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
        return str(ours) if ours.exists() else shutil.which("azurite-blob")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def store(self) -> AzureStore:
        """Return a client of the container."""
        return AzureStore(
            CONTAINER,
            account_name=ACCOUNT,
            account_key=KEY,
            endpoint=self.endpoint,
            client_options={"allow_http": True},
        )

    def start(self) -> Azurite:
        program = self.program()
        assert program is not None
        self._process = subprocess.Popen(
            [
                *(program, "--blobPort", str(self.port), "--location", str(self._directory)),
                *("--silent", "--skipApiVersionCheck", "--disableTelemetry"),
            ],
            stdout=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, "azurite has ended"
            assert time.monotonic() < end_s, "azurite does not answer"
            time.sleep(0.05)
        self._make_container()
        return self

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int | None:
        """The id of the process, while it runs."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Azurite:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def _make_container(self) -> None:
        # https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
        path = f"/{ACCOUNT}/{CONTAINER}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        signed = "\n".join(
            ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
        )
        signed += f"\n/{ACCOUNT}{path}\nrestype:container"
        digest = hmac.digest(base64.b64decode(KEY), signed.encode(), "sha256")
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        status = connection.getresponse().status
        connection.close()
        assert status in (201, 409), f"no container: {status}"
