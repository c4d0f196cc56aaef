from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier_sdk.codecs.aes_gcm import read_keys

KEY = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chunk.keys"
    path.touch(mode=0o600)
    return path


def test_keys_are_read_in_their_order(file: Path) -> None:
    file.write_text(f"# the next one\n{'AB' * 32}\n\n  {KEY}  \n")
    assert read_keys(str(file)) == [b"\xab" * 32, bytes.fromhex(KEY)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no key; make one with 'openssl rand -hex 32'"),
        ("# only words\n", "holds no key"),
        (f"{KEY}\n{KEY[:-1]}\n", "line 2 of the key file is not a key of 64 hexadecimal digits"),
        (f"{KEY}{KEY}", "line 1"),
        (f"key = {KEY}", "line 1"),
        (f"{KEY[:-1]}\N{FULLWIDTH DIGIT ONE}", "line 1"),
        (f"{KEY}\n{'0' * 64}\n", "key in line 2 of the key file is zero; make one with 'openssl"),
        ("# " + "x" * 70_000, "longer than 65536 bytes"),
    ],
)
def test_what_is_no_key_file_is_told(file: Path, content: str, message: str) -> None:
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        read_keys(str(file))
    assert KEY[:16] not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    file.write_text(KEY)
    file.chmod(mode)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}.*run 'chmod 600 {file}'"):
        read_keys(str(file))


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(KEY)
    owner = file.stat().st_uid
    if os.geteuid() == 0:
        owner = 12345
        os.chown(file, owner, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=f"belongs to user {owner}, who can read and change it"):
        read_keys(str(file))


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Is a directory"):
        read_keys(str(tmp_path))
    with pytest.raises(ValueError, match="cannot read the key file: No such file"):
        read_keys(str(tmp_path / "absent"))
