"""Servers for the protocols of S3, Azure and Google."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.azurite import Azurite
from support.loops import loop_factories
from support.s3_server import S3Server

pytest_asyncio_loop_factories = loop_factories


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "GOOGLE_SERVICE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start an S3 server for Google's tests, because obstore sends both services the same XML."""
    with S3Server(tmp_path_factory.mktemp("gs"), auth=False) as server:
        yield server
