"""Reads the file that holds the keys of a codec."""

from __future__ import annotations

import os
import re
import stat

from kvtier_sdk.options.secret_sources import read_small_file

KEY_BYTES = 32
_KEY = re.compile(rf"[0-9A-Fa-f]{{{2 * KEY_BYTES}}}")
_MAX_FILE_BYTES = 1 << 16
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ADVICE = f"make one with 'openssl rand -hex {KEY_BYTES}'"


def read_keys(path: str) -> list[bytes]:
    """Read 256-bit keys, one per line in hexadecimal; skip empty lines and ``#`` comments."""
    # Error messages never quote the file's content.
    try:
        text = _read_private(path)
    except OSError as error:
        raise ValueError(f"cannot read the key file: {error.strerror}") from None
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        if _KEY.fullmatch(entry) is None:
            raise ValueError(
                f"line {number} of the key file is not a key of {2 * KEY_BYTES} hexadecimal digits"
            )
        key = bytes.fromhex(entry)
        if not any(key):
            raise ValueError(f"the key in line {number} of the key file is zero; {_ADVICE}")
        keys.append(key)
    if not keys:
        raise ValueError(f"the key file holds no key; {_ADVICE}")
    return keys


def _read_private(path: str) -> str:
    try:
        content, status = read_small_file(path, _MAX_FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"the key file {error}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"the key file belongs to user {status.st_uid}, who can read and change it; make new "
            f"keys in a file of user {os.geteuid()}, as whom the engine runs"
        )
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(
            f"the key file has mode {mode:04o}, so others than its owner can use "
            f"it; run 'chmod 600 {path}', and make new keys if they were readable for long"
        )
    return content.decode("ascii", errors="replace")
