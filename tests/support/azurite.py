"""Azurite, Microsoft's emulator of Azure Blob Storage, on a free loopback port."""

from __future__ import annotations

import base64
import hmac
import http.client
import shutil
import socket
from email.utils import formatdate
from pathlib import Path

from obstore.store import AzureStore

from support.server import ServerProcess, free_port

#: The account that every Azurite server has, and the account's published key.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "chunks"
_VERSION = "2021-08-06"


class Azurite(ServerProcess):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "azurite.log")
        self._directory = directory
        self.port = free_port()

    @staticmethod
    def program() -> str | None:
        ours = Path(__file__).parents[2] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
        return str(ours) if ours.exists() else shutil.which("azurite-blob")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def store(self) -> AzureStore:
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
        self.launch(
            *(program, "--blobPort", str(self.port), "--location", str(self._directory)),
            *("--silent", "--skipApiVersionCheck", "--disableTelemetry"),
        )
        self.wait_until(self._answers, "azurite answers")
        self._make_container()
        return self

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
        # See https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key.
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
