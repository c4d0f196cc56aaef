"""A private certificate authority, for servers that speak TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_papers(at: Path) -> SimpleNamespace:
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

    def paper(name: str, *rest: str) -> None:
        openssl(
            *["req", "-x509", *new_key, "-days", "2", "-subj", f"/CN={name}"],
            *["-keyout", f"{at}/{name}.key", "-out", f"{at}/{name}.crt", *rest],
        )

    paper("ca", "-addext", "keyUsage=critical,keyCertSign")
    signed = f"-CA {at}/ca.crt -CAkey {at}/ca.key -addext basicConstraints=CA:FALSE".split()
    paper("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    paper("client", *signed)
    return SimpleNamespace(
        ca=f"{at}/ca.crt",
        server=[f"{at}/server.crt", f"{at}/server.key"],
        client=[f"{at}/client.crt", f"{at}/client.key"],
    )
