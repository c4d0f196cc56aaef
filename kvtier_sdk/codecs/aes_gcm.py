"""Seals chunks with AES-256-GCM.

The envelope has 48 bytes::

    offset  length  field
    0       8       id of the sealing key, derived from that key
    8       24      salt, random for each chunk
    32      16      GCM's tag

Each chunk has a separate key, which HKDF-Expand (RFC 5869, SHA-256) derives from the file's key and
the salt. So the nonce can be constant, and the file's key can seal any number of chunks. With
random 96-bit nonces under one key, all engines together could seal only 2^32 chunks.
"""

from __future__ import annotations

import hmac
import os
import re
import stat

from kvtier_sdk.contract import ChunkCodec
from kvtier_sdk.errors import ChunkAuthError, ConfigError
from kvtier_sdk.options.secret_sources import read_small_file

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM
except ImportError as error:
    raise ConfigError(
        "codec 'aes-gcm' needs cryptography: pip install 'kvtier-sdk[seal]'"
    ) from error

_ID_BYTES = 8
_SALT_BYTES = 24
_TAG_BYTES = 16
_TAG_AT = _ID_BYTES + _SALT_BYTES
_ID_INFO = b"kvtier aes-gcm key id"
_CHUNK_INFO = b"kvtier aes-gcm chunk"
_NONCE = bytes(12)
KEY_BYTES = 32
_KEY = re.compile(rf"[0-9A-Fa-f]{{{2 * KEY_BYTES}}}")
_MAX_FILE_BYTES = 1 << 16
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ADVICE = f"make one with 'openssl rand -hex {KEY_BYTES}'"


class AESGCMCodec(ChunkCodec):
    """The codec ``aes-gcm:FILE``. It seals with FILE's first key and opens with any key in FILE."""

    envelope_bytes = _TAG_AT + _TAG_BYTES

    def __init__(self, argument: str | None) -> None:
        if not argument:
            raise ValueError("needs a key file: 'aes-gcm:/etc/kvtier/chunk.keys'")
        super().__init__(None)
        keys = read_keys(argument)
        self._writer_id = _key_id(keys[0])
        self._keys = {_key_id(key): key for key in keys}

    def seal(
        self, associated: bytes, payload: memoryview, sealed: memoryview, envelope: memoryview
    ) -> None:
        salt = os.urandom(_SALT_BYTES)
        chunk_key = _expand(self._keys[self._writer_id], _CHUNK_INFO + salt)
        cipher = Cipher(AES(chunk_key), GCM(_NONCE)).encryptor()
        cipher.authenticate_additional_data(associated)
        cipher.update_into(payload, sealed)
        cipher.finalize()
        envelope[:] = self._writer_id + salt + cipher.tag

    def open(
        self, associated: bytes, envelope: memoryview, sealed: memoryview, payload: memoryview
    ) -> None:
        key_id = bytes(envelope[:_ID_BYTES])
        key = self._keys.get(key_id)
        if key is None:
            raise ChunkAuthError(
                f"sealed with key {key_id.hex()}, which is not in the key file", unknown_key=True
            )
        chunk_key = _expand(key, _CHUNK_INFO + bytes(envelope[_ID_BYTES:_TAG_AT]))
        cipher = Cipher(AES(chunk_key), GCM(_NONCE, bytes(envelope[_TAG_AT:]))).decryptor()
        cipher.authenticate_additional_data(associated)
        cipher.update_into(sealed, payload)
        try:
            cipher.finalize()
        except InvalidTag:
            raise ChunkAuthError("not what was sealed under this key and namespace") from None


def _key_id(key: bytes) -> bytes:
    return _expand(key, _ID_INFO)[:_ID_BYTES]


def _expand(key: bytes, info: bytes) -> bytes:
    """Return the first block (32 bytes) of the output of HKDF-Expand."""
    return hmac.digest(key, info + b"\x01", "sha256")


def read_keys(path: str) -> list[bytes]:
    """Read 256-bit keys in hexadecimal, one per line; skip empty lines and ``#`` comments."""
    # Error messages must not quote the file's content.
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
