from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier_sdk import ConfigError, admin
from kvtier_sdk.admin import AdminSocket
from kvtier_sdk.cli.engine import ask


def echo(request: Mapping[str, Any], caller: str) -> dict[str, Any]:
    return {"got": request}


def send(path: Path, data: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as lines:
            answer: dict[str, Any] = json.loads(lines.readline())
    return answer


def test_one_request_one_answer_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with AdminSocket(path, echo):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for number in range(3):
            assert ask(path, {"n": number}) == {"got": {"n": number}}
    assert not path.exists()
    with pytest.raises(OSError, match="No such file"):
        ask(path, {})


def test_a_dead_process_s_socket_is_replaced_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with AdminSocket(path, echo):
        with pytest.raises(
            ConfigError, match=rf"process {os.getpid()} \(.*\) serves .*engine.sock"
        ):
            AdminSocket(path, echo)
        assert ask(path, {}) == {"got": {}}


def test_the_socket_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    first = AdminSocket(path, echo)
    path.unlink()
    with AdminSocket(path, echo):
        first.close()
        assert ask(path, {}) == {"got": {}}


def test_a_path_that_cannot_be_a_socket_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path, reason in (
        (tmp_path / "file", "exists and is not a socket"),
        (tmp_path / "no" / "engine.sock", "No such file"),
        (tmp_path / ("x" * 120), "too long"),
    ):
        with pytest.raises(ConfigError, match=f"admin_socket.*{reason}"):
            AdminSocket(path, echo)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "data", [b"", b"status\n", b"[1]\n", b"\xff\n", b"[" * 60_000 + b"\n", b"x" * 100_000]
)
def test_nonsense_is_answered_and_the_next_client_served(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "engine.sock"
    with AdminSocket(path, echo):
        try:
            assert "the request is not JSON" in send(path, data)["error"]
        except ConnectionError:
            assert len(data) > 64 * 1024, "no more than that is read"
        assert ask(path, {}) == {"got": {}}


def test_a_client_that_goes_away_or_says_nothing_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin._Client, "timeout", 0.1)
    path = tmp_path / "engine.sock"
    with AdminSocket(path, echo), socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(path))
            gone.sendall(b'{"n": 1}\n')
        # The socket answers only after it has dropped the silent client.
        assert ask(path, {}, timeout_s=30.0) == {"got": {}}


def test_the_mode_is_never_that_of_what_a_link_points_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "engine.sock", tmp_path / "other"
    other.touch(mode=0o644)

    class Swapped(socket.socket):
        """A socket that another user of the directory replaces with a symlink during ``bind``."""

        def bind(self, address: Any) -> None:
            super().bind(address)
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            path.unlink()
            path.symlink_to(other)

    monkeypatch.setattr("kvtier_sdk.admin.socket.socket", Swapped)
    AdminSocket(path, echo).close()
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


def test_an_error_of_the_engine_is_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Mapping[str, Any], caller: str) -> dict[str, Any]:
        raise KeyError("no such thing")

    path = tmp_path / "engine.sock"
    with AdminSocket(path, fail):
        assert ask(path, {}) == {"error": "KeyError: 'no such thing'"}
        assert ask(path, {}) == {"error": "KeyError: 'no such thing'"}
    assert "cannot answer" in caplog.text


def test_its_thread_ends(tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(3):
        with AdminSocket(tmp_path, echo):
            assert threading.active_count() == before + 1
    assert threading.active_count() == before
