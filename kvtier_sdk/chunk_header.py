"""The integrity header of every chunk.

Layout, little-endian, 64 bytes::

    offset  length  field
    0       4       magic, b"KVTC"
    4       1       format version
    5       1       flags: 1 if the payload is sealed by a codec, 2 if it is compressed
    6       2       header length: 64 plus the envelope, rounded up to the tier's alignment
    8       8       chunk length
    16      8       payload length, before padding: the chunk length, or less if compressed
    24      16      binding: xxh3-128 of the namespace's fingerprint and the key
    40      16      payload digest: xxh3-128; zeros if the payload is sealed or digests are off
    56      8       header check: xxh3-64 of the 56 bytes before it
    64              a sealed payload's envelope, in the codec's own layout; then zeros as padding

The binding detects a chunk that was stored under another key or in another namespace. The digest
detects a damaged chunk. xxh3 is not cryptographic, so the header guards against faults, not against
an adversary who can write to the store. A :class:`kvtier_sdk.ChunkCodec` guards against both.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvtier_sdk.errors import ChunkAuthError, CorruptChunkError, TierContractError
from kvtier_sdk.types import OffloadKey

HEADER_VERSION = 2
_MAGIC = b"KVTC"
_FIELDS = struct.Struct("<4sBBHQQ16s16s")
_CHECK = struct.Struct("<Q")
_DIGEST_BYTES = 16
_SEALED, _COMPRESSED = 1, 2
_HEADER_BYTES = _FIELDS.size + _CHECK.size


def header_bytes(alignment: int, envelope_bytes: int = 0) -> int:
    return round_up(_HEADER_BYTES + envelope_bytes, alignment)


def round_up(size_bytes: int, alignment: int) -> int:
    return -(-size_bytes // alignment) * alignment


class ChunkHeader:
    """Writes and checks one tier's headers. Any thread may use an instance: it is immutable."""

    def __init__(
        self,
        fingerprint: str,
        chunk_bytes: int,
        alignment: int = 1,
        *,
        verify: bool = True,
        sealed: bool = False,
    ) -> None:
        self._fingerprint = fingerprint.encode()
        self._chunk_bytes = chunk_bytes
        self._payload_bytes = round_up(chunk_bytes, alignment)
        self._verify = verify
        self._sealed = sealed

    @property
    def digest_bytes(self) -> int:
        """Maximum number of payload bytes that the digest covers; 0 for no digest."""
        return self._chunk_bytes if self._verify and not self._sealed else 0

    def seal(
        self, key: OffloadKey, header: memoryview, payload: memoryview, digest: bytes | None = None
    ) -> None:
        """Write a chunk's header; compute the payload's digest if ``digest`` is ``None``."""
        # Only a compressed payload is shorter than a chunk.
        compressed = len(payload) < self._payload_bytes
        stored_bytes = len(payload) if compressed else self._chunk_bytes
        if not self.digest_bytes:
            digest = bytes(_DIGEST_BYTES)
        elif digest is None:
            digest = xxh3_128_digest(payload[:stored_bytes])
        elif len(digest) != _DIGEST_BYTES:
            raise TierContractError(f"brought a digest of {len(digest)} bytes, not {_DIGEST_BYTES}")
        fields = _FIELDS.pack(
            _MAGIC,
            HEADER_VERSION,
            _SEALED * self._sealed | _COMPRESSED * compressed,
            len(header),
            self._chunk_bytes,
            stored_bytes,
            self._binding(key),
            digest,
        )
        header[:_HEADER_BYTES] = fields + _CHECK.pack(xxh3_64_intdigest(fields))
        header[_HEADER_BYTES:] = bytes(len(header) - _HEADER_BYTES)

    def check(
        self, key: OffloadKey, header: memoryview, payload: memoryview, digest: bytes | None = None
    ) -> None:
        """Raise :class:`CorruptChunkError` unless key, header and payload belong together."""
        if not self._verify:
            return
        fields = bytes(header[: _FIELDS.size])
        (check,) = _CHECK.unpack(header[_FIELDS.size : _HEADER_BYTES])
        magic, version, flags, length, chunk_bytes, stored_bytes, binding, expected = (
            _FIELDS.unpack(fields)
        )
        if magic != _MAGIC:
            raise CorruptChunkError("the object does not begin with a kvtier header")
        if check != xxh3_64_intdigest(fields):
            raise CorruptChunkError("the header is damaged")
        if version != HEADER_VERSION:
            raise CorruptChunkError(
                f"format version {version}; this release reads {HEADER_VERSION}"
            )
        if flags & ~_COMPRESSED != self._sealed:
            if self._sealed:
                raise ChunkAuthError("the chunk is not sealed")
            raise CorruptChunkError(f"flags {flags}; expected 0")
        if length != len(header):
            raise CorruptChunkError(f"header of {length} bytes; expected {len(header)}")
        if chunk_bytes != self._chunk_bytes:
            raise CorruptChunkError(f"chunk of {chunk_bytes} bytes; expected {self._chunk_bytes}")
        padded_bytes = stored_bytes if flags & _COMPRESSED else self._payload_bytes
        if len(payload) != padded_bytes:
            raise CorruptChunkError(f"payload of {len(payload)} bytes; expected {padded_bytes}")
        if flags & _COMPRESSED and stored_bytes >= self._payload_bytes:
            raise CorruptChunkError(f"compressed payload of {stored_bytes} bytes; expected fewer")
        if binding != self._binding(key):
            raise CorruptChunkError("the chunk belongs to another key or namespace")
        if not self._sealed and (digest or xxh3_128_digest(payload[:stored_bytes])) != expected:
            raise CorruptChunkError("the payload does not match its digest")

    def associated_data(self, key: OffloadKey, header: memoryview) -> bytes:
        """Return a sealed payload's associated data: header fields, namespace and key."""
        # Only the key's length varies, so no two chunks have the same associated data.
        return bytes(header[:_HEADER_BYTES]) + self._fingerprint + key

    def envelope(self, header: memoryview, envelope_bytes: int) -> memoryview:
        return header[_HEADER_BYTES : _HEADER_BYTES + envelope_bytes]

    def _binding(self, key: OffloadKey) -> bytes:
        # The fingerprint's length is fixed, so no two chunks hash the same bytes.
        return xxh3_128_digest(self._fingerprint + key)
