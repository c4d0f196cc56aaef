"""The stores of the scenarios, with a context manager for each fault.

After a fault's context manager exits, the fault has ended, and a killed server answers again.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_digest, xxh3_128_digest

from kvtier_sdk import SystemClock
from support.proxy import Proxy
from support.redis_server import Server
from support.s3_server import S3Server
from support.tier_process import tier_processes

MODEL = "chaos"
_HOUR_S = 3600.0
_TMPFS_BYTES = 64 * 2**20
# Enough inodes for the directories of a namespace and for a few hundred chunks.
_TMPFS_INODES = 700
_NOBODY = 65534
# If a store has more chunks of the second model than this, it has the whole first request.
_REQUEST_CHUNKS = 40
_DISK_BYTES = 256 * 2**20
_LINK_BYTES_PER_S = 1e6
# A connection is cut after this many bytes, which are enough for lookups but not for a chunk.
_CUT_AFTER_BYTES = 20_000
_MOUNT_WAIT_S = 10.0

#: Code that each new interpreter runs. It sets the clock back an hour while a file exists.
_CLOCK_BEHIND = """
import os, time

def behind(real=time.time, flag={flag!r}):
    return real() - {behind_s} if os.path.exists(flag) else real()

time.time = behind
"""
_KVTIER = (sys.executable, "-m", "kvtier_sdk.cli")


class Link:
    """A network link to a server on loopback; the link can be slow, or cut its connections."""

    def __init__(self, to_port: int) -> None:
        self.proxy = Proxy(to_port, "tcp")
        self._loop = asyncio.new_event_loop()
        url = self._loop.run_until_complete(self.proxy.start())
        self.port = int(url.rpartition(":")[2])
        self._thread = threading.Thread(target=self._loop.run_forever, name="link")
        self._thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.proxy.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class CannotHappenError(Exception):
    """Raised if this machine cannot produce the fault."""


class FlaggedClock(SystemClock):
    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def wall_s(self) -> float:
        return super().wall_s() - (_HOUR_S if self._flag.exists() else 0.0)


class Place(ABC):
    def __init__(self, directory: Path, fault: str) -> None:
        self.config = directory / "kv.json"
        self.broken: list[str] = []
        self._flag = directory / "clock-is-behind"
        self.clock = FlaggedClock(self._flag)
        self._ended = ExitStack()
        try:
            self._prepare(directory, fault)
        except BaseException:
            self._ended.close()
            raise
        customs = directory / "customs"
        customs.mkdir()
        (customs / "sitecustomize.py").write_text(
            _CLOCK_BEHIND.format(flag=str(self._flag), behind_s=_HOUR_S)
        )
        path = filter(None, (str(customs), os.environ.get("PYTHONPATH")))
        self.environment = {"PYTHONPATH": os.pathsep.join(path)}

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the tier under test, through the link if the fault is in the link."""

    @property
    def clean_url(self) -> str:
        return self.url

    def close(self) -> None:
        self._ended.close()

    @contextmanager
    def nothing(self) -> Iterator[None]:
        yield

    @contextmanager
    def clock_behind(self) -> Iterator[None]:
        self._flag.touch()
        yield
        self._flag.unlink()

    @contextmanager
    def child_killed(self) -> Iterator[None]:
        for child in tier_processes(os.getpid()):
            os.kill(child, signal.SIGKILL)
        yield

    @contextmanager
    def model_deleted(self) -> Iterator[None]:
        removal = self._kvtier("tier", "rm", self.config, "--model", MODEL, "--yes")
        (engine,) = removal["engines"]
        if not engine.get("forgotten_chunks") or engine["chunks_in_use"]:
            self.broken.append(f"the host pool was not purged: {engine}")
        yield

    @contextmanager
    def second_model(self) -> Iterator[None]:
        replay = ("replay", "--tier", self.url, "--slots", "96")
        command = [*_KVTIER, *replay, "--requests", "2000"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as engine:
            while engine.poll() is None:
                listed = self._kvtier("tier", "ls", self.url)["tiers"][0]["namespaces"]
                second = [one for one in listed if one["facts"]["engine"] == "kvtier replay"]
                if second and second[0]["chunks"] > _REQUEST_CHUNKS:
                    engine.kill()
        yield
        again = self._kvtier(*replay, "--requests", "1")
        if again["hit_blocks"] < again["blocks"]:
            self.broken.append(f"{again['hit_blocks']} of {again['blocks']} chunks came back")
        fingerprint = second[0]["fingerprint"]
        self._kvtier("tier", "rm", self.url, "--namespace", fingerprint, "--yes")

    def _kvtier(self, *words: str | Path) -> Any:
        command = [*_KVTIER, *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.broken.append(f"kvtier {words[0]} ended with {done.returncode}: {done.stderr}")
        return json.loads(done.stdout)

    @abstractmethod
    def _prepare(self, directory: Path, fault: str) -> None: ...


class ServedPlace(Place):
    """A store on a server, reached through a :class:`Link` if the fault is in the link."""

    _server: Server | S3Server
    _link: Link | None = None

    @property
    def clean_url(self) -> str:
        return self._server.url

    def _serve(self, server: Server | S3Server, fault: str) -> None:
        self._server = server.start()
        self._ended.callback(server.kill)
        if fault in ("body_cut", "slow_link"):
            self._link = Link(server.port)
            self._ended.callback(self._link.close)

    @abstractmethod
    def _empty(self) -> None:
        """Remove the stopped server's chunks."""

    @contextmanager
    def server_killed(self) -> Iterator[None]:
        self._server.kill()
        yield
        self._server.start()

    @contextmanager
    def server_emptied(self) -> Iterator[None]:
        self._server.kill()
        self._empty()
        yield
        self._server.start()

    @contextmanager
    def server_frozen(self) -> Iterator[None]:
        self._server.pause()
        try:
            yield
        finally:
            self._server.resume()

    @contextmanager
    def body_cut(self) -> Iterator[None]:
        assert self._link is not None
        self._link.proxy.each_bytes = _CUT_AFTER_BYTES
        yield
        self._link.proxy.each_bytes = None

    @contextmanager
    def slow_link(self) -> Iterator[None]:
        assert self._link is not None
        self._link.proxy.bytes_per_s = _LINK_BYTES_PER_S
        yield
        self._link.proxy.bytes_per_s = None


class RedisPlace(ServedPlace):
    """A redis-server that logs each write before it replies. A kill loses no chunk."""

    _server: Server

    def _prepare(self, directory: Path, fault: str) -> None:
        self._log = directory / "redis" / "appendonlydir"
        logging = ("--appendonly", "yes", "--appendfsync", "always")
        self._serve(Server(directory / "redis", *logging), fault)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._link.port}" if self._link else self._server.url

    def _empty(self) -> None:
        shutil.rmtree(self._log)


class S3Place(ServedPlace):
    _server: S3Server

    def _prepare(self, directory: Path, fault: str) -> None:
        self._serve(S3Server(directory / "s3"), fault)

    @property
    def url(self) -> str:
        if self._link is None:
            return self._server.url
        return self._server.tier_url(endpoint=f"http://127.0.0.1:{self._link.port}")

    def _empty(self) -> None:
        bucket = self._server.buckets / "kv"
        shutil.rmtree(bucket)
        bucket.mkdir()


class FilePlace(Place):
    """A directory, on a separate file system if the fault is in the file system."""

    def _prepare(self, directory: Path, fault: str) -> None:
        self._at = directory / "at"
        self._at.mkdir()
        self._root = self._at / "kv"
        if fault == "file_system_full":
            self._mount("-t", "tmpfs", "-o", f"size={_TMPFS_BYTES}", "kvtier")
        elif fault == "inodes_used_up":
            self._mount("-t", "tmpfs", "-o", f"nr_inodes={_TMPFS_INODES}", "kvtier")
        elif fault == "root_planted" and os.geteuid() != 0:
            raise CannotHappenError("only root can give a directory to another user")
        elif fault == "writes_frozen":
            self._mount_disk(directory / "image")
        elif fault in ("file_system_hung", "read_only", "io_errors"):
            self._refusal = directory / "refusal"
            self._mount_mirror(directory / "behind")

    @property
    def url(self) -> str:
        return f"file://{self._root}?min_free=0"

    @contextmanager
    def directory_removed(self) -> Iterator[None]:
        # Ignore errors, because the tier can create files in the directory meanwhile.
        shutil.rmtree(self._root, ignore_errors=True)
        yield

    @contextmanager
    def root_planted(self) -> Iterator[None]:
        planted = self._at / "planted"
        with suppress(shutil.Error):  # a store can rename its file meanwhile
            shutil.copytree(self._root, planted)
        for path in (planted, *planted.rglob("*")):
            if path.suffix == ".kv":
                path.write_bytes(_forged(path.read_bytes()))
            os.chown(path, _NOBODY, _NOBODY)
        former = self._root.rename(self._at / "former")
        planted.rename(self._root)
        while former.exists():  # the tier can create files in it meanwhile
            shutil.rmtree(former, ignore_errors=True)
        yield
        shutil.rmtree(self._root)

    @contextmanager
    def file_system_full(self) -> Iterator[None]:
        filler = self._at / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield
        filler.unlink()

    @contextmanager
    def inodes_used_up(self) -> Iterator[None]:
        filler = self._at / "filler"
        filler.mkdir()
        with suppress(OSError):
            for number in range(_TMPFS_INODES):
                (filler / str(number)).touch()
        yield
        shutil.rmtree(filler)

    @contextmanager
    def writes_frozen(self) -> Iterator[None]:
        subprocess.run(["fsfreeze", "--freeze", self._at], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", self._at], check=True)

    @contextmanager
    def file_system_hung(self) -> Iterator[None]:
        self._mirror.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._mirror.send_signal(signal.SIGCONT)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        with self._refusing("EROFS"):
            yield

    @contextmanager
    def io_errors(self) -> Iterator[None]:
        with self._refusing("EIO"):
            yield

    @contextmanager
    def _refusing(self, error: str) -> Iterator[None]:
        whole = self._refusal.with_suffix(".new")
        whole.write_text(error)
        whole.rename(self._refusal)
        yield
        self._refusal.unlink()

    def _mount(self, *arguments: str | Path) -> None:
        command = ["mount", *arguments, self._at]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            raise CannotHappenError(f"cannot mount: {mounted.stderr.strip()}")
        self._ended.callback(subprocess.run, ["umount", "-l", self._at], check=True)

    def _mount_disk(self, image: Path) -> None:
        with image.open("wb") as file:
            file.truncate(_DISK_BYTES)
        missing = [tool for tool in ("mkfs.ext4", "fsfreeze") if shutil.which(tool) is None]
        if missing:
            raise CannotHappenError(f"{missing[0]} is missing")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
        self._mount("-o", "loop", image)

    def _mount_mirror(self, behind: Path) -> None:
        if importlib.util.find_spec("mfusepy") is None or not Path("/dev/fuse").exists():
            raise CannotHappenError("a file system in a process needs /dev/fuse and mfusepy")
        behind.mkdir()
        command = [sys.executable, "-m", "support.chaos.mirror"]
        self._mirror = subprocess.Popen(
            [*command, behind, self._at, self._refusal],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.PIPE,
        )
        self._ended.callback(self._unmount_mirror)
        end_s = time.monotonic() + _MOUNT_WAIT_S
        while not os.path.ismount(self._at):
            if self._mirror.poll() is not None or time.monotonic() > end_s:
                raise CannotHappenError("libfuse cannot mount: as root, apt-get install fuse3")
            time.sleep(0.01)

    def _unmount_mirror(self) -> None:
        # Killing the mirror ends the calls that hang in it.
        self._mirror.kill()
        self._mirror.communicate()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.umount2(os.fsencode(self._at), 2)


def _forged(chunk: bytes) -> bytes:
    (header_bytes,) = struct.unpack_from("<Q", chunk, 8)
    payload = bytes(len(chunk) - header_bytes)
    fields = chunk[:40] + xxh3_128_digest(payload)
    return fields + xxh3_64_digest(fields)[::-1] + chunk[64:header_bytes] + payload


PLACES: dict[str, type[Place]] = {"file": FilePlace, "redis": RedisPlace, "s3": S3Place}
