"""Real vLLM engines, each in its own process, and their configurations for offloading."""

from __future__ import annotations

import json
import math
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_PATIENCE_S = 60.0

HOST = Path(__file__).with_name("vllm_host.py")

#: Tokens in a block on a CPU. A chunk is one block.
BLOCK_TOKENS = 128
#: Payload of a chunk of the model below: keys and values of four layers in float32.
CHUNK_BYTES = 2**20

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def make_prompt(seed: int, chunks: int, extra: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(chunks * BLOCK_TOKENS + extra)]


@dataclass(frozen=True)
class Way:
    name: str
    spec: str
    entry_type: str | None = None

    def offloading(
        self,
        url: str,
        *,
        host_bytes: int = 64 * 2**20,
        verify: bool = True,
        patient: bool = True,
        **entry: Any,
    ) -> dict[str, Any]:
        entry = {"url": url, **({"lookup_deadline": "30s"} if patient else {}), **entry}
        # Name a revision, because generated weights have no file that identifies the model.
        options = {"verify": verify, "model_revision": "made up"}
        config: dict[str, Any] = {
            "spec_name": self.spec,
            "spec_module_path": "kvtier_vllm",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [entry],
        }
        if self.entry_type is None:
            config |= {**options, **({"recompute": "1h"} if patient else {})}
        else:
            entry |= {"type": self.entry_type, **options}
        return config


OUR_TIERS = Way("a", "KVTierCPUTieringSpec", "kvtier")
OUR_MANAGER = Way("b", "KVTierOffloadingSpec")


#: Allowed difference of log-probabilities. The number of tokens computed at once changes them by up
#: to 3e-5. A wrong token in a prompt changes all of the top five by at least 7e-3.
LOGPROB_ERROR = 1e-4


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Return true if all outputs have equal tokens and nearly equal logprobs."""
    return [out["tokens"] for out in ours] == [out["tokens"] for out in theirs] and all(
        math.isclose(one, other, rel_tol=0, abs_tol=LOGPROB_ERROR)
        for our_out, their_out in zip(ours, theirs, strict=True)
        for one, other in zip(_logprobs(our_out), _logprobs(their_out), strict=True)
    )


def _logprobs(output: dict[str, Any]) -> list[float]:
    # Sort by value, because either of two equally likely tokens can be the fifth.
    return [logprob for top in output["logprobs"] for logprob in sorted(value for _, value in top)]


class EngineError(Exception):
    log = ""


class Interpreter:
    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._socket = folder / "socket"
        self._log = folder / "interpreter.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HOST), str(self._socket), str(threads)],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise EngineError(f"vLLM cannot be imported:\n{self._log.read_text()[-4000:]}")

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._socket))
        return connection

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Engine:
    """An engine's process, whose commands are the public methods of ``vllm_host.Host``."""

    def __init__(
        self,
        interpreter: Interpreter,
        model: Path,
        log: Path,
        offloading: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._log = log
        self._connection = interpreter.connect()
        self._commands = self._connection.makefile("w")
        self._answers = self._connection.makefile("r")
        self._send(
            {
                "model": str(model),
                "log": str(log),
                "environment": environment or {},
                "offloading": offloading,
                "max_model_len": 2048,
                **options,
            }
        )
        try:
            self._receive()
        except EngineError as error:
            self.close()
            error.log = self.log()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, command: str) -> Any:
        if command.startswith("_"):
            raise AttributeError(command)

        def call(**arguments: Any) -> Any:
            self._send({"do": command, **arguments})
            return self._receive()

        return call

    def close(self) -> None:
        if self._connection.fileno() < 0:
            return
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        error = self._answers.readline()
        for end in (self._commands, self._answers, self._connection):
            with suppress(OSError):
                end.close()
        if error and not sys.exc_info()[0]:
            raise EngineError(f"shutting down: {json.loads(error)['error']}")

    def log(self) -> str:
        return self._log.read_text()

    def _send(self, document: dict[str, Any]) -> None:
        self._commands.write(json.dumps(document) + "\n")
        self._commands.flush()

    def _receive(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise EngineError(f"the engine died:\n{self.log()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["result"]


def settle_until(engine: Engine, holds: Callable[[], object], what: str) -> None:
    """Step an idle engine until ``holds`` returns true, for up to a minute."""
    end_s = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {_PATIENCE_S:g} s: {what}")
        engine.settle()
