"""An operator's afternoon: common failures of a cache, and how kvtier reports them.

    python examples/afternoon.py

Two small engines, one per model, share a directory and a Redis server, with default options. Then a
model is deleted, the disk and the server fail, the directory is recreated, and the engines restart.
In between, an operator's commands run and print their output. Every chunk that an engine loads is
compared with the stored chunk. If a check fails, the exit status is 1.

The example needs redis-server. The scene of the full disk needs root, to mount a small file system.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier_sdk import (
    LookupResult,
    Namespace,
    OffloadKey,
    RequestContext,
    TieringConfig,
    TierStats,
    make_offload_key,
)
from kvtier_sdk.engine import open_manager, open_pool

CHUNK_BYTES = 64 * 1024
PROMPT_CHUNKS = 20
DISK = "64m"
CONFIG = """\
slots = 60
chunk_bytes = "64KiB"
admin_socket = "{folder}/{name}.sock"
tiers = ["file://{folder}/disk/kv?capacity=48MiB", "redis://127.0.0.1:{port}/0"]
"""
_STEP_S = 0.01
_PATIENCE_S = 60.0


class Engine:
    """A small engine that computes prompts, offloads their chunks, and loads the chunks again."""

    def __init__(self, name: str, model: str) -> None:
        self.name, self.model = name, model
        self.unequal_chunks = 0
        self._requests = 0

    @contextmanager
    def running(self, folder: Path) -> Iterator[None]:
        config = TieringConfig.from_file(folder / f"{self.name}.toml")
        namespace = Namespace({"model": self.model})
        with open_pool(config) as pool, open_manager(pool, config, namespace) as manager:
            self.pool, self.manager = pool, manager
            yield

    def serve(self, prompt: int) -> bool:
        """Serve a prompt; return true if all chunks of the prompt were loaded."""
        keys = [
            make_offload_key(f"{self.model} {prompt} {place}".encode().ljust(32, b"."))
            for place in range(PROMPT_CHUNKS)
        ]
        self._requests += 1
        request = RequestContext(f"{self.name}-{self._requests}")
        self.manager.on_new_request(request)
        found = keys[: self._look_up(keys, request)]
        slots = self.manager.prepare_load(found, request).slots
        for key, slot in zip(found, slots, strict=True):
            self.unequal_chunks += self.pool.view(slot) != content(key)
        self.manager.complete_load(found, request)
        # Compute one chunk per step, so that kvtier can measure how long computing takes. kvtier
        # loads a chunk only if loading is faster.
        for key in keys[len(found) :]:
            output = self.manager.prepare_store([key], request)
            for slot in output.slots:
                self.pool.view(slot)[:] = content(key)
            self.step()
            self.manager.complete_store(output.keys_to_store, request)
        self.manager.on_request_finished(request)
        self.step()
        return len(found) == len(keys)

    def step(self) -> None:
        """End a step, and sleep instead of running a model."""
        self.manager.on_schedule_end()
        rest()

    def _look_up(self, keys: Sequence[OffloadKey], request: RequestContext) -> int:
        """Return the number of chunks before the first miss."""
        for count, key in enumerate(keys):
            while (result := self.manager.lookup(key, request)) is not LookupResult.HIT:
                if result is LookupResult.MISS:
                    return count
                self.step()
        return len(keys)


class Afternoon:
    """The scenes, with the operator's commands and the checks of the outcome."""

    def __init__(self, folder: Path) -> None:
        self.failed = 0
        self._folder = folder
        self._disk = folder / "disk"
        self._root = self._disk / "kv"
        self._redis = RedisServer(folder)
        self._llama = Engine("llama", "llama-3.1-8b")
        self._qwen = Engine("qwen", "qwen3-8b")
        self._engines = (self._llama, self._qwen)

    def play(self) -> None:
        for engine in self._engines:
            text = CONFIG.format(folder=self._folder, name=engine.name, port=self._redis.port)
            (self._folder / f"{engine.name}.toml").write_text(text)
        with self._redis.running(), small_disk(self._disk) as is_small:
            with self._running():
                self._fill()
                self._delete_a_model()
                if is_small:
                    self._full_disk()
                self._frozen_redis()
                self._root_made_anew()
            with self._running():
                self._restart()
        self._check(
            "No chunk that came back differed from the one that was stored",
            not sum(engine.unequal_chunks for engine in self._engines),
        )

    def _fill(self) -> None:
        title("Two models fill the tiers")
        self._serve(self._llama, range(8))
        self._serve(self._qwen, range(4))
        self._type("tier du llama.toml")
        self._type("top llama.sock --once")
        self._check("A prompt that has left the pool comes back", self._llama.serve(0))

    def _delete_a_model(self) -> None:
        title("A model is deleted everywhere, and stored again")
        self._type("tier rm qwen.toml --model qwen --yes")
        self._check("Its prompts are computed again", not self._qwen.serve(3))
        self._check("The other model's prompts come back", self._llama.serve(1))
        self._serve(self._qwen, range(4, 12))
        self._type("tier du llama.toml")
        self._check("What was computed since comes back", self._qwen.serve(4))

    def _full_disk(self) -> None:
        title("Another program fills the disk, and gives it back")
        hog = self._disk / "hog"
        fill(hog)
        self._serve(self._llama, range(8, 16))
        self._type("top llama.sock --once")
        hog.unlink()
        self._serve(self._llama, range(16, 24))
        self._type("top llama.sock --once")
        self._check("What was computed since comes back", self._llama.serve(16))

    def _frozen_redis(self) -> None:
        title("Redis hangs: it accepts connections, and does not answer")
        with self._redis.frozen():
            self._serve(self._llama, range(24, 30), settle=False)
            self._wait_until("redis", lambda tier: bool(tier.is_slow))
            self._type("top llama.sock --once")
            self._check("Prompts on the disk come back", self._llama.serve(24))
        self._wait_until("redis", is_ok)
        self._type("top llama.sock --once")

    def _root_made_anew(self) -> None:
        title("The directory is made anew, with write access for all")
        shutil.rmtree(self._root)
        self._root.mkdir()
        self._root.chmod(0o777)
        self._serve(self._llama, range(30, 32))
        self._type("top llama.sock --once")
        self._check("Nothing was stored into it", not any(self._root.iterdir()))
        self._root.chmod(0o700)
        self._wait_until("file", is_ok)
        self._serve(self._llama, range(32, 34))
        self._check("With its mode repaired it is used again", any(self._root.iterdir()))

    def _restart(self) -> None:
        title("The engines restart")
        self._check("A prompt of before comes back", self._llama.serve(33))
        self._type("tier verify llama.toml")

    @contextmanager
    def _running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.running(self._folder))
            yield

    def _serve(self, engine: Engine, prompts: range, *, settle: bool = True) -> None:
        for prompt in prompts:
            engine.serve(prompt)
            if settle:
                until(lambda: not engine.manager.has_pending_work(), engine.step)

    def _type(self, line: str) -> None:
        """Run a ``kvtier`` command while the engines step."""
        print(f"\n$ kvtier {line}", flush=True)
        kvtier = str(Path(sys.executable).with_name("kvtier"))
        with subprocess.Popen([kvtier, *shlex.split(line)], cwd=self._folder) as command:
            until(lambda: command.poll() is not None, self._step)

    def _wait_until(self, tier: str, is_so: Callable[[TierStats], bool]) -> None:
        (stats,) = (one for one in self._llama.manager.stats if one.name == tier)
        until(lambda: is_so(stats), self._step)

    def _step(self) -> None:
        for engine in self._engines:
            engine.step()

    def _check(self, claim: str, is_true: bool) -> None:
        self.failed += not is_true
        print(f"\n{claim}." if is_true else f"\nNOT SO: {claim}.", flush=True)


class RedisServer:
    """A redis-server on a free loopback port, without a password."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._folder = folder

    @contextmanager
    def running(self) -> Iterator[None]:
        options = f"--port {self.port} --bind 127.0.0.1 --maxmemory 48mb"
        command = ["redis-server", *options.split(), "--maxmemory-policy", "allkeys-lru"]
        log = subprocess.DEVNULL
        with subprocess.Popen([*command, "--save", ""], cwd=self._folder, stdout=log) as process:
            self._process = process
            try:
                until(self._answers)
                yield
            finally:
                process.kill()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system; yield false if this process may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    is_small = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    if not is_small:
        print("The scene of the full disk is left out: to mount a small file system takes root.")
    try:
        yield is_small
    finally:
        if is_small:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def is_ok(tier: TierStats) -> bool:
    return not (tier.is_slow or tier.reads_open or tier.stores_open)


def fill(file: Path) -> None:
    """Write a file until its file system is full."""
    with file.open("wb", buffering=0) as output:
        try:
            while output.write(bytes(2**16)):
                pass
        except OSError:
            pass


def content(key: OffloadKey) -> bytes:
    return (key * CHUNK_BYTES)[:CHUNK_BYTES]


def rest() -> None:
    time.sleep(_STEP_S)


def until(
    is_so: Callable[[], bool], wait: Callable[[], None] = lambda: time.sleep(_STEP_S)
) -> None:
    """Poll a condition until it is true; raise TimeoutError after a minute."""
    end_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"the condition was still false after {_PATIENCE_S:g} s")
        wait()


def title(text: str) -> None:
    print(f"\n## {text}", flush=True)


def main() -> int:
    logging.basicConfig(
        format="%(levelname)s %(message)s", level=logging.WARNING, stream=sys.stdout
    )
    with tempfile.TemporaryDirectory(prefix="kvtier-afternoon-") as name:
        os.chmod(name, 0o755)
        afternoon = Afternoon(Path(name))
        afternoon.play()
    return 1 if afternoon.failed else 0


if __name__ == "__main__":
    sys.exit(main())
