"""The likeliest mistakes of an operator, and a healthy start, with the output of each."""

from __future__ import annotations

import json
import logging
import re
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from kvtier_sdk import KVTierError, Namespace, TieringConfig, make_offload_key
from kvtier_sdk.engine import open_manager, open_pool
from kvtier_vllm.early_check import check_engine
from support.live import Live

#: Facts of the engine that starts.
ENGINE = {"model": "llama", "dtype": "bfloat16", "hash_seed": "0"}
CHUNK_BYTES = 64 << 10
KEYS = [make_offload_key(bytes([index]) * 32) for index in range(3)]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in an engine's configuration.

    Attributes:
        title: the mistake in a few words.
        text: TOML for an engine of our own; JSON of ``kv_connector_extra_config`` for vLLM. Names
            in braces stand for places that a test makes.
    """

    title: str
    text: str

    @property
    def is_vllms(self) -> bool:
        """True if the text is vLLM's."""
        return self.text.lstrip().startswith("{")


MISTAKES = [
    Mistake(
        "An option is misspelt",
        """
        pool_bytes = "1MiB"
        tiers = ["file:{dir}/kv?capcity=1GiB"]
        """,
    ),
    Mistake(
        "A size has a unit that does not exist",
        """
        pool_bytes = "1MiB"
        tiers = ["file:{dir}/kv?capacity=200Gig"]
        """,
    ),
    Mistake(
        "A duration has no unit",
        """
        pool_bytes = "1MiB"
        tiers = ["file:{dir}/kv?lookup_deadline=50"]
        """,
    ),
    Mistake(
        "A tier's type is misspelt",
        """
        pool_bytes = "1MiB"
        tiers = [{type = "fiel", root = "{dir}/kv"}]
        """,
    ),
    Mistake(
        "A backend is not installed",
        """
        pool_bytes = "1MiB"
        tiers = ["nfs://host/export"]
        """,
    ),
    Mistake(
        "A backend was written for another release of kvtier",
        """
        pool_bytes = "1MiB"
        tiers = ["newer:"]
        """,
    ),
    Mistake(
        "The eviction policy does not exist",
        """
        pool_bytes = "1MiB"
        policy = "lrv"
        """,
    ),
    Mistake(
        "Two tiers have one name",
        """
        pool_bytes = "1MiB"
        tiers = ["file:{dir}/a", "file:{dir}/b"]
        """,
    ),
    Mistake(
        "Two tiers keep their chunks in one place",
        """
        pool_bytes = "1MiB"
        tiers = ["file:{dir}/kv?capacity=1GiB", "file:{dir}/kv?capacity=2GiB&name=cold"]
        """,
    ),
    Mistake(
        "The root is a file",
        """
        pool_bytes = "1MiB"
        tiers = ["file:{dir}/kv.toml"]
        """,
    ),
    Mistake(
        "The root cannot be written",
        """
        pool_bytes = "1MiB"
        tiers = ["file:/proc/kv"]
        """,
    ),
    Mistake(
        "The capacity is below one chunk",
        """
        pool_bytes = "1MiB"
        tiers = ["file:{dir}/kv?capacity=4KiB"]
        """,
    ),
    Mistake(
        "The host pool is larger than the memory",
        """
        pool_bytes = "1PiB"
        """,
    ),
    Mistake(
        "The host pool is smaller than one chunk",
        """
        pool_bytes = "4KiB"
        """,
    ),
    Mistake(
        "Redis is down",
        """
        pool_bytes = "1MiB"
        tiers = ["redis://127.0.0.1:1"]
        """,
    ),
    Mistake(
        "Redis is down, and the tier is required",
        """
        pool_bytes = "1MiB"
        tiers = ["redis://127.0.0.1:1?required=true"]
        """,
    ),
    Mistake(
        "Redis refuses the password",
        """
        pool_bytes = "1MiB"
        tiers = ["redis://:hunter2@127.0.0.1:{redis}"]
        """,
    ),
    Mistake(
        "Redis does not speak TLS",
        """
        pool_bytes = "1MiB"
        tiers = ["rediss://:right@127.0.0.1:{redis}"]
        """,
    ),
    Mistake(
        "Redis is addressed by http",
        """
        pool_bytes = "1MiB"
        tiers = [{type = "redis", url = "http://127.0.0.1:{redis}"}]
        """,
    ),
    Mistake(
        "The bucket does not exist",
        """
        pool_bytes = "1MiB"
        tiers = ["s3://kvcache/chunks?{s3}"]
        """,
    ),
    Mistake(
        "There are no credentials for S3",
        """
        pool_bytes = "1MiB"
        tiers = ["s3://kv/chunks?endpoint={endpoint}&region=us-east-1"]
        """,
    ),
    Mistake(
        "S3 refuses the credentials",
        """
        pool_bytes = "1MiB"
        tiers = ["s3://kv/chunks?endpoint={endpoint}&{ada}"]
        """,
    ),
    Mistake(
        "vLLM: the spec's name is misspelt",
        """
        {
            "spec_name": "KVTierOfloadingSpec",
            "spec_module_path": "kvtier_vllm",
            "cpu_bytes_to_use": "1MiB"
        }
        """,
    ),
    Mistake(
        "vLLM: the spec's module is missing",
        """
        {"spec_name": "KVTierOffloadingSpec", "cpu_bytes_to_use": "1MiB"}
        """,
    ),
    Mistake(
        "vLLM: a size with a unit under vLLM's own manager",
        """
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": "4GiB",
            "secondary_tiers": [{"type": "kvtier", "backend": "memory"}]
        }
        """,
    ),
    Mistake(
        "vLLM: the host pool is larger than the memory",
        """
        {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier_vllm",
            "cpu_bytes_to_use": "1PiB"
        }
        """,
    ),
    Mistake(
        "vLLM: Redis refuses the password",
        """
        {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier_vllm",
            "cpu_bytes_to_use": "1MiB",
            "model_revision": "v1",
            "secondary_tiers": ["redis://:hunter2@127.0.0.1:{redis}"]
        }
        """,
    ),
    Mistake(
        "vLLM: the bucket does not exist",
        """
        {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1048576,
            "secondary_tiers": [
                {"type": "kvtier", "url": "s3://kvcache/chunks?{s3}", "model_revision": "v1"}
            ]
        }
        """,
    ),
    Mistake(
        "vLLM: it is not known which revision of the model is served",
        """
        {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier_vllm",
            "cpu_bytes_to_use": "1MiB"
        }
        """,
    ),
]

HEALTHY = """
pool_bytes = "1MiB"
tiers = [
    "memory:?capacity=1MiB",
    "file:{dir}/kv?capacity=1GiB&name=disk",
    {url = "redis://:right@127.0.0.1:{redis}", ttl = "1h", lookup_deadline = "5s", required = true},
    {url = "s3://kv/chunks?{s3}", name = "cold", lookup_deadline = "5s"},
]
"""


def print_mistake(mistake: Mistake, places: Mapping[str, str]) -> str:
    """Make a mistake; return the warnings of the log, and the error that ends the start."""
    text = _filled(mistake.text, places)
    with _Lines(logging.WARNING) as said:
        try:
            if mistake.is_vllms:
                _start_vllm(json.loads(text), places)
            else:
                with _engine(text, places, {"runner": "thread"}):
                    pass
        except KVTierError as error:
            said.lines.append(f"{type(error).__name__}: {error}")
    return _without_places(said.lines, places)


def print_start(places: Mapping[str, str], **facts: str) -> str:
    """Start an engine, have it store chunks, and end it; return its log.

    ``facts`` replace those of the namespace of all other starts.
    """
    with (
        _Lines(logging.INFO) as said,
        _engine(_filled(HEALTHY, places), places, facts=facts) as engine,
    ):
        # Each tier logs its line once its store has reported its contents.
        said.wait_for(": open", 4)
        said.wait_for("nothing here can be hit", 3 if facts else 0)
        engine.store(engine.begin("r1"), *KEYS)
    block, *opened = said.lines
    return _without_places([block, *sorted(opened)], places)


class _Lines(logging.Handler):
    """Collects the lines of kvtier's log."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self._logger = logging.getLogger("kvtier")
        self._before = logging.NOTSET

    def __enter__(self) -> Self:
        self._before = self._logger.level
        self._logger.setLevel(self.level)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)

    def emit(self, record: logging.LogRecord) -> None:
        with self._arrived:
            self.lines.append(self.format(record))
            self._arrived.notify()

    def wait_for(self, text: str, count: int) -> None:
        """Wait until ``count`` lines contain a text."""

        def is_there() -> bool:
            return sum(text in line for line in self.lines) == count

        with self._arrived:
            assert self._arrived.wait_for(is_there, timeout=60), self.lines


@contextmanager
def _engine(
    text: str,
    places: Mapping[str, str],
    runner: Mapping[str, Any] = MappingProxyType({}),
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Live]:
    file = Path(places["dir"], "kv.toml")
    file.write_text(text)
    config = TieringConfig.from_file(file)
    tiers = [replace(spec, runner=spec.runner.model_copy(update=runner)) for spec in config.tiers]
    config = config.model_copy(update={"tiers": tuple(tiers)})
    with (
        open_pool(config, chunk_bytes=CHUNK_BYTES) as pool,
        open_manager(pool, config, Namespace({**ENGINE, **facts})) as manager,
    ):
        yield Live(manager, pool, threading.Event())


def _start_vllm(extra: dict[str, Any], places: Mapping[str, str]) -> None:
    options = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    check_engine(options, "meta-llama/Llama-3.1-8B", Path(places["dir"], "hub"))


def _filled(text: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", place)
    return textwrap.dedent(text).strip()


def _without_places(lines: Sequence[str], places: Mapping[str, str]) -> str:
    """Replace the parts that differ between machines and runs with names."""
    # Only a busy machine logs this line.
    text = "\n".join(line for line in lines if "still opening after" not in line)
    for name in ("dir", "endpoint", "redis"):
        text = text.replace(places[name], name.upper())
    text = re.sub(r"(?<=installed: ).*", "...", text)
    # The server's memory and the disk's free space differ between machines.
    text = re.sub(r"(?<=redis: open: ).*", "...", text)
    text = re.sub(r"(?<=disk has ).*(?= free)", "...", text)
    free = re.compile(r"[0-9.]+ .iB are free in [^:]*(: make the pool smaller, or).*")
    return free.sub(r"... are free in ...\1 ...", text)
