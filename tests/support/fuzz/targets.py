"""Fuzz targets. Each target passes bytes to a reader, and fails if the reader breaks this rule:

A reader accepts untrusted bytes as a whole, or refuses them with a declared error. No length in the
bytes decides how much memory the reader allocates.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType

import kvtier_s3.http
from kvtier_file.budget import Budget
from kvtier_file.ledger import Ledger, LedgerDamagedError
from kvtier_file.shared_header import HeaderFile, SharedHeader
from kvtier_file.usage_replica import UsageReplica
from kvtier_redis.resp import Exchange, Kind, Reply, run_some
from kvtier_sdk import (
    Connection,
    CorruptChunkError,
    KVTierError,
    Namespace,
    TierError,
    TieringConfig,
    TierSpec,
    make_offload_key,
)
from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.codecs import planes
from kvtier_sdk.runner.process.messages import (
    MessageError,
    MessageSplitter,
    read_event,
    read_job,
    read_plain,
    read_reports,
    write_event,
    write_job,
    write_reports,
)
from support import reference_planes
from support.extensions import compile_extension
from support.guarded import GuardedBuffers
from support.peer import converse

_KEY = make_offload_key(b"k" * 32)
_FINGERPRINT = "ab" * 16
_PAYLOAD = bytes(range(43))
_GUARD = b"\xa5" * 64


def chunk_header(data: bytes) -> None:
    """Only an intact header with its own payload is accepted."""
    header, payload = bytearray(64), bytearray(_PAYLOAD)
    checker = ChunkHeader(_FINGERPRINT, len(payload))
    checker.seal(_KEY, memoryview(header), memoryview(payload))
    damaged = bytes(a ^ b for a, b in zip(header + payload, data.ljust(107, b"\0"), strict=False))
    is_intact = damaged == header + payload
    try:
        checker.check(_KEY, memoryview(damaged)[:64], memoryview(damaged)[64:])
    except CorruptChunkError:
        assert not is_intact
    else:
        assert is_intact


def coded_planes(data: bytes) -> None:
    """Every coder refuses a payload or decodes it within the buffer, and all coders agree."""
    kind, size = data[0] % 6 if data else 0, int.from_bytes(data[1:3], "little")
    stored = data[3:]
    if size >= len(stored) and data[1:2] != b"\xff":
        # With a correct footer, the fuzzer reaches the code that reads the blocks.
        stored += struct.pack("<4sHHQ", b"KVPL", 1, kind, size)
    if len(stored) > size:
        return
    results = []
    for coder in _coders():
        memory = bytearray(stored.ljust(size, b"\0") + _GUARD)
        is_good = coder.decode(kind, memoryview(memory), len(stored), size)
        assert memory[size:] == _GUARD
        results.append(bytes(memory) if is_good else None)
    assert results[0] == results[-1]


@cache
def _coders() -> list[ModuleType]:
    source = Path(planes.__file__).with_name("_planes.c")
    compiled = planes.coder or compile_extension(source, _directory())
    return [reference_planes] if compiled is None else [reference_planes, compiled]


def redis_reader(data: bytes) -> None:
    """A reply fills a chunk's buffers with the sent value, or is refused."""
    text = data[1:]
    slots = [GuardedBuffers(3, 40), GuardedBuffers(3, 40)]
    exchanges = [Exchange(b"k", [b"load"], slot.buffers) for slot in slots]
    exchanges += [Exchange(b"k", [b"store"]), Exchange(b"k", [b"store"])]

    async def talk(connection: Connection) -> None:
        await run_some(connection, deque(exchanges), len(exchanges))

    converse(talk, text, _pieces(data))
    for slot in slots:
        assert slot.is_guarded()
    for exchange, slot in zip(exchanges, slots, strict=False):
        reply = exchange.outcome
        if isinstance(reply, Reply) and reply.kind is Kind.VALUE and int(reply.text) <= 43:
            value = slot.content[: int(reply.text)]
            assert b"$%b\r\n%b\r\n" % (reply.text.encode(), value) in text
    for exchange in exchanges:
        assert isinstance(exchange.outcome, Reply | TierError | None)


def s3_reader(data: bytes) -> None:
    """A response fills a chunk's buffers with the sent body, or is refused."""
    text = data[1:]
    slot = GuardedBuffers(3, 40)

    async def talk(connection: Connection) -> kvtier_s3.http.Response:
        return await kvtier_s3.http.request(connection, [b"GET"], slot.buffers)

    response = None
    with suppress(TierError):
        response = converse(talk, text, _pieces(data))
    assert slot.is_guarded()
    if response is not None:
        assert len(response.body) <= 256 * 1024
        if response.status == 200 and response.length_bytes in range(1, len(slot.content) + 1):
            assert b"\r\n\r\n" + slot.content[: response.length_bytes] in text


def _pieces(data: bytes) -> list[int]:
    """Return the lengths of the pieces to send: each is the value of ``data``'s first byte."""
    return [data[0]] * (len(data) // data[0]) if data and data[0] else []


def manifest(data: bytes) -> None:
    """Any JSON object can serve as a namespace's facts, and be compared, written and read again."""
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(facts, dict):
        return
    ours = Namespace({"model": "m", "dtype": "bf16"})
    ours.differences(facts)
    theirs = Namespace(facts)
    written = json.loads(theirs.manifest_json())
    assert written["fingerprint"] == theirs.fingerprint
    assert theirs.differences(written["facts"]) == {}


def file_header(data: bytes) -> None:
    """The header of a file tier's root is read back unchanged, or counts as damaged."""
    content = bytearray(data.ljust(4096, b"\0"))
    if data[:1] != b"\xff":
        # With a correct checksum, the fuzzer reaches the code that reads the fields.
        content[:8] = b"kvtfile1"
        leases = int.from_bytes(content[56:60], "little")
        checksum = zlib.crc32(memoryview(content)[16 : 60 + 32 * leases])
        content[12:16] = checksum.to_bytes(4, "little")
    with _memory_file(bytes(content)) as fd:
        header = HeaderFile(fd).read()
        assert len(header.reservations) <= len(content) // 32
        HeaderFile(fd).write(header)
        assert HeaderFile(fd).read() == header


def ledger(data: bytes) -> None:
    """A ledger is read to its end or refused, whatever length the shared header states."""
    told_bytes = int.from_bytes(data[:8].ljust(8, b"\0"), "little")
    records = data[8:]
    for ledger_bytes in (told_bytes, len(records)):
        with _memory_file(records) as fd:
            with suppress(LedgerDamagedError):
                list(Ledger(fd).read(0, ledger_bytes))
            header = SharedHeader(clean=True, generation=1, ledger_bytes=ledger_bytes)
            replica = UsageReplica(Budget(None, lambda _: None), _FINGERPRINT)
            if replica.catch_up(header, Ledger(fd)):
                assert len(replica.budget) == replica.budget.used_bytes == 0


def config_toml(data: bytes) -> None:
    """A TOML file is refused, or is a configuration that can be written and read again."""
    _configuration(data, ".toml")


def config_json(data: bytes) -> None:
    _configuration(data, ".json")


def config_yaml(data: bytes) -> None:
    _configuration(data, ".yaml")


def tier_url(data: bytes) -> None:
    """A URL is refused, or names a tier whose options can be written and read again."""
    text = data.decode(errors="surrogateescape")
    try:
        spec = TierSpec.from_url(text)
    except KVTierError as error:
        str(error)
        return
    repr(spec)
    again = TierSpec.from_options(spec.to_dict(secrets=True))
    assert again.to_dict(secrets=True) == spec.to_dict(secrets=True)


def messages(data: bytes) -> None:
    """Any bytes from a tier's process are either rejected or decoded into jobs and reports."""
    splitter = MessageSplitter()
    with suppress(MessageError):
        for start in range(0, len(data), 7):
            splitter.split(data[start : start + 7])
    for read in (read_plain, _read_job, _read_reports, _read_event):
        with suppress(MessageError):
            read(data)


def _read_job(data: bytes) -> None:
    job = read_job(data)
    assert repr(read_job(write_job(job))) == repr(job)


def _read_event(data: bytes) -> None:
    event = read_event(data)
    assert read_event(write_event(event)) == event


def _read_reports(data: bytes) -> None:
    reports = read_reports(data)
    assert repr(read_reports(write_reports(reports))) == repr(reports)


def _configuration(data: bytes, suffix: str) -> None:
    path = _directory() / f"options{suffix}"
    path.write_bytes(data)
    try:
        config = TieringConfig.from_file(path)
    except KVTierError as error:
        str(error)
        return
    repr(config)
    written = config.to_dict(secrets=True)
    assert TieringConfig.from_dict(written).to_dict(secrets=True) == written


@cache
def _directory() -> Path:
    return Path(mkdtemp(prefix="kvtier-fuzz-"))


@contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("kvtier-fuzz")
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        chunk_header,
        coded_planes,
        redis_reader,
        s3_reader,
        manifest,
        file_header,
        ledger,
        config_toml,
        config_json,
        config_yaml,
        tier_url,
        messages,
    )
}
