"""Captures the log of an engine's start, with and without an operator's likely mistakes."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from kvtier_sdk import KVTierError, Namespace, TieringConfig, make_offload_key
from kvtier_sdk.engine import open_manager, open_pool
from kvtier_vllm.early_check import check_engine
from support.live import Live

ENGINE = {"model": "llama", "dtype": "bfloat16", "hash_seed": "0"}
CHUNK_BYTES = 64 << 10
KEYS = [make_offload_key(bytes([index]) * 32) for index in range(3)]


def _engine_with(*tiers: str, pool_bytes: str = "1MiB", policy: str = "returns") -> str:
    lines = [
        f'pool_bytes = "{pool_bytes}"',
        f'policy = "{policy}"',
        f"tiers = [{', '.join(tiers)}]",
    ]
    return "\n".join(lines)


_OURS = {
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier_vllm",
    "cpu_bytes_to_use": "1MiB",
}
_VLLMS: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20}

#: The mistakes by title. A string is a TOML configuration, and a mapping is vLLM's
#: ``kv_connector_extra_config``. Names in braces stand for directories and servers of the test.
MISTAKES: dict[str, str | dict[str, Any]] = {
    "An option is misspelt": _engine_with('"file:{dir}/kv?capcity=1GiB"'),
    "A size has a unit that does not exist": _engine_with('"file:{dir}/kv?capacity=200Gig"'),
    "A duration has no unit": _engine_with('"file:{dir}/kv?lookup_deadline=50"'),
    "A tier's type is misspelt": _engine_with('{type = "fiel", root = "{dir}/kv"}'),
    "A backend is not installed": _engine_with('"nfs://host/export"'),
    "A backend was written for another release of kvtier": _engine_with('"newer:"'),
    "The eviction policy does not exist": _engine_with(policy="lrv"),
    "Two tiers have one name": _engine_with('"file:{dir}/a"', '"file:{dir}/b"'),
    "Two tiers keep their chunks in one place": _engine_with(
        '"file:{dir}/kv?capacity=1GiB"', '"file:{dir}/kv?capacity=2GiB&name=cold"'
    ),
    "The root is a file": _engine_with('"file:{dir}/kv.toml"'),
    "The root cannot be written": _engine_with('"file:/proc/kv"'),
    "The capacity is below one chunk": _engine_with('"file:{dir}/kv?capacity=4KiB"'),
    "The host pool is larger than the memory": _engine_with(pool_bytes="1PiB"),
    "The host pool is smaller than one chunk": _engine_with(pool_bytes="4KiB"),
    "Redis is down": _engine_with('"redis://127.0.0.1:1"'),
    "Redis is down, and the tier is required": _engine_with('"redis://127.0.0.1:1?required=true"'),
    "Redis refuses the password": _engine_with('"redis://:hunter2@127.0.0.1:{redis}"'),
    "Redis does not speak TLS": _engine_with('"rediss://:right@127.0.0.1:{redis}"'),
    "Redis is addressed by http": _engine_with(
        '{type = "redis", url = "http://127.0.0.1:{redis}"}'
    ),
    "The bucket does not exist": _engine_with('"s3://kvcache/chunks?{s3}"'),
    "There are no credentials for S3": _engine_with(
        '"s3://kv/chunks?endpoint={endpoint}&region=us-east-1"'
    ),
    "S3 refuses the credentials": _engine_with('"s3://kv/chunks?endpoint={endpoint}&{ada}"'),
    "vLLM: the spec's name is misspelt": _OURS | {"spec_name": "KVTierOfloadingSpec"},
    "vLLM: the spec's module is missing": {
        "spec_name": "KVTierOffloadingSpec",
        "cpu_bytes_to_use": "1MiB",
    },
    "vLLM: a size with a unit under vLLM's own manager": _VLLMS
    | {"cpu_bytes_to_use": "4GiB", "secondary_tiers": [{"type": "kvtier", "backend": "memory"}]},
    "vLLM: the host pool is larger than the memory": _OURS | {"cpu_bytes_to_use": "1PiB"},
    "vLLM: Redis refuses the password": _OURS
    | {"model_revision": "v1", "secondary_tiers": ["redis://:hunter2@127.0.0.1:{redis}"]},
    "vLLM: the bucket does not exist": _VLLMS
    | {
        "secondary_tiers": [
            {"type": "kvtier", "url": "s3://kvcache/chunks?{s3}", "model_revision": "v1"}
        ]
    },
    "vLLM: it is not known which revision of the model is served": _OURS,
}

HEALTHY = """
pool_bytes = "1MiB"
tiers = [
    "memory:?capacity=1MiB",
    "file:{dir}/kv?capacity=1GiB&name=disk",
    {url = "redis://:right@127.0.0.1:{redis}", ttl = "1h", lookup_deadline = "5s", required = true},
    {url = "s3://kv/chunks?{s3}", name = "cold", lookup_deadline = "5s"},
]
"""


def print_mistake(mistake: str | dict[str, Any], places: Mapping[str, str]) -> str:
    with _Lines(logging.WARNING) as said:
        try:
            if isinstance(mistake, dict):
                _start_vllm(json.loads(_filled(json.dumps(mistake), places)), places)
            else:
                with _engine(_filled(mistake, places), places, {"runner": "thread"}):
                    pass
        except KVTierError as error:
            said.lines.append(f"{type(error).__name__}: {error}")
    return _without_places(said.lines, places)


def print_start(places: Mapping[str, str], **facts: str) -> str:
    """Start an engine with changed facts, store chunks, and end the engine; return the log."""
    with (
        _Lines(logging.INFO) as said,
        _engine(_filled(HEALTHY, places), places, facts=facts) as engine,
    ):
        # A tier logs ": open" after it has read the usage of its store.
        said.wait_for(": open", 4)
        said.wait_for("nothing here can be hit", 3 if facts else 0)
        engine.store(engine.begin("r1"), *KEYS)
    block, *opened = said.lines
    return _without_places([block, *sorted(opened)], places)


class _Lines(logging.Handler):
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
    return text


def _without_places(lines: Sequence[str], places: Mapping[str, str]) -> str:
    """Return the lines in a form that is the same on all machines and in all runs."""
    # The line "still opening after" appears only on a busy machine.
    text = "\n".join(line for line in lines if "still opening after" not in line)
    for name in ("dir", "endpoint", "redis"):
        text = text.replace(places[name], name.upper())
    text = re.sub(r"(?<=installed: ).*", "...", text)
    # Cut Redis's memory and the disk's free space, which differ between machines.
    text = re.sub(r"(?<=redis: open: ).*", "...", text)
    text = re.sub(r"(?<=disk has ).*(?= free)", "...", text)
    free = re.compile(r"[0-9.]+ .iB are free in [^:]*(: make the pool smaller, or).*")
    return free.sub(r"... are free in ...\1 ...", text)
