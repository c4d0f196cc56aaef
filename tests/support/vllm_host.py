"""Real engines, each in its own process, driven by one JSON document per line.

``vllm_engine.py`` runs this program with the path of a socket and the number of threads. The
program imports vLLM once, because the import takes longer than an engine's start, and then forks an
engine's process for each connection. The engine core runs in the forked process, where commands can
inspect the tiers' counters and the caches.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from dataclasses import fields
from typing import Any

# Do not compile models, because each engine serves too few prompts to gain from compiling.
os.environ.update(
    OMP_NUM_THREADS=sys.argv[2],
    TORCHDYNAMO_DISABLE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

#: The largest dummy weight. vLLM's own dummy weights are too small to affect the outputs.
WEIGHT = 0.08
# This prompt is never stored, because it is shorter than a block.
TICK = [1, 2, 3]


def give_weight() -> None:
    """Initialize each parameter with its own dummy weights, large enough to affect the outputs."""
    from vllm.model_executor.model_loader import dummy_loader

    make_up = dummy_loader.initialize_single_dummy_weight
    seeds = itertools.count()

    def make_up_larger(parameter: Any) -> None:
        make_up(parameter, low=-WEIGHT, high=WEIGHT, seed=next(seeds))
        if parameter.dim() == 1:
            # Shift the weights of norm layers, because real weights are around 1.
            parameter.data.add_(1.0)

    dummy_loader.initialize_single_dummy_weight = make_up_larger


def hide_llvmlite() -> None:
    """Hide ``__dict__`` of llvmlite's library: llvmlite mistakes this name for a C function."""
    from llvmlite.binding import ffi

    find = ffi._lib_wrapper.__getattr__

    def find_functions(lib: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return find(lib, name)

    ffi._lib_wrapper.__getattr__ = find_functions


class Host:
    """An engine, whose public methods are the commands."""

    def __init__(
        self,
        model: str,
        offloading: dict[str, Any] | None,
        connector: str = "OffloadingConnector",
        **options: Any,
    ) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        if offloading is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=offloading
            )
        if connector.startswith("LMCache"):
            hide_llvmlite()
        give_weight()
        self._llm = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            **{"dtype": "float32", **options},
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._events: list[list[Any]] = []
        self._numbers = itertools.count()
        # The output of each added request; ``None`` until the request has finished.
        self._served: dict[str, Any] = {}
        self._watch_events()
        self._step_as_served()

    # --- serving ------------------------------------------------------------------------------

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 4, **params: Any
    ) -> list[dict[str, Any]]:
        """Serve prompts together; return their tokens, top-5 logprobs, cached tokens and delays."""
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = self._sampling(max_tokens=max_tokens, **params)
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        return [self._told(output) for output in outputs]

    def settle(self) -> None:
        """Step until nothing is in flight, because the engine does not step after ``generate``."""
        connector = self._scheduler.connector
        self.generate([TICK], max_tokens=1)
        while self._scheduler.has_requests() or connector.has_pending_push_work():
            self._engine.step()

    def add(
        self, prompts: list[list[int]], hints: dict[str, Any] | None = None, **params: Any
    ) -> None:
        """Add requests; ``hints`` maps the actions of vLLM's ``kv_hints`` to their payloads."""
        for prompt in prompts:
            name = f"serve-{next(self._numbers)}"
            self._engine.add_request(
                name,
                {"prompt_token_ids": prompt},
                self._sampling(**params),
                **({} if hints is None else {"kv_hints": self._envelope(hints)}),
            )
            self._served[name] = None

    def step_until_loading(self) -> bool:
        while self._engine.has_unfinished_requests():
            if self._loads_running():
                return True
            self._step()
        return False

    def abort(self, index: int) -> None:
        name = list(self._served)[index]
        self._engine.abort_request([name])
        del self._served[name]

    def finish(self) -> list[dict[str, Any]]:
        """Finish the added requests that were not aborted; return their outputs."""
        while self._engine.has_unfinished_requests():
            self._step()
        served, self._served = self._served, {}
        return [self._told(output) for output in served.values()]

    def reset_device(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def reset_all(self) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def shut_down(self) -> None:
        self._engine.engine_core.shutdown()

    # --- inspection ---------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        return {
            tier.name: {field.name: getattr(tier, field.name) for field in fields(tier)}
            for tier in self._tiers()
        }

    def device_blocks(self) -> int:
        pool = self._scheduler.kv_cache_manager.block_pool
        return len(pool.cached_block_hash_to_block)

    def primary_chunks(self) -> int:
        manager = self._manager()
        if self._is_ours(manager):
            usage = manager.usage()
            return usage.slots - usage.free
        primary = manager.primary_tier
        return primary._num_chunks - primary._get_num_free_chunks()

    def leftovers(self) -> dict[str, int]:
        manager = self._manager()
        if self._is_ours(manager):
            left: dict[str, int] = manager.left_over()
            return left
        primary = manager.primary_tier
        return {
            "pinned": self.primary_chunks() - primary._num_evictable_cache_chunks,
            "jobs": len(manager._jobs),
            "requests": len(manager._req_state),
            **{f"{tier.tier_type} holds": tier.under_way for tier in manager.secondary_tiers},
        }

    def preemptions(self) -> int:
        return int(self._metric("vllm:num_preemptions"))

    def metrics(self) -> dict[str, float]:
        return {
            ",".join(
                [
                    sample.name,
                    *(
                        f"{label}={value}"
                        for label, value in sorted(sample.labels.items())
                        if label not in ("engine", "model_name")
                    ),
                ]
            ): sample.value
            for sample in self._samples()
            if sample.name.startswith("kvtier_") and not sample.name.endswith("_created")
        }

    def events(self) -> list[list[Any]]:
        """Return the type, medium and number of chunks of each event since the last call."""
        events, self._events = self._events, []
        return events

    # --- helpers ------------------------------------------------------------------------------

    def _sampling(self, max_tokens: int = 4, **params: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=5,
            detokenize=False,
            **params,
        )

    def _envelope(self, hints: dict[str, Any]) -> Any:
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        actions = [
            KvHintAction(action_id=name, action_type=name, action_version="1", payload=payload)
            for name, payload in hints.items()
        ]
        return KvHintsEnvelope(protocol_version="1", message_id="m", actions=actions)

    def _step_as_served(self) -> None:
        """Release the GIL after a step without computation, as vLLM's server does."""
        core = self._engine.engine_core.engine_core
        step = core.step_fn

        def step_and_pause() -> Any:
            outputs, executed = step()
            if not executed and core.scheduler.has_requests():
                time.sleep(0.001)
            return outputs, executed

        core.step_fn = step_and_pause

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._served[output.request_id] = output

    def _told(self, output: Any) -> dict[str, Any]:
        return {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                sorted([token, entry.logprob] for token, entry in step.items())
                for step in output.outputs[0].logprobs
            ],
            "cached": output.num_cached_tokens,
            "first_token_s": output.metrics.first_token_latency,
        }

    def _watch_events(self) -> None:
        publisher = self._scheduler.kv_event_publisher
        publish = publisher.publish

        def note(batch: Any) -> None:
            for event in batch.events:
                hashes = getattr(event, "block_hashes", ())
                medium = getattr(event, "medium", None)
                self._events.append([type(event).__name__, medium, len(hashes)])
            publish(batch)

        publisher.publish = note

    def _samples(self) -> list[Any]:
        from prometheus_client import REGISTRY

        return [sample for family in REGISTRY.collect() for sample in family.samples]

    def _metric(self, name: str) -> float:
        return sum(sample.value for sample in self._samples() if sample.name == f"{name}_total")

    def _loads_running(self) -> bool:
        manager = self._manager()
        if self._is_ours(manager):
            return manager.usage().loading > 0
        return any(job.transfer_job.is_promotion for job in manager._jobs.values())

    def _manager(self) -> Any:
        return self._scheduler.connector.connector_scheduler.manager

    def _is_ours(self, manager: Any) -> bool:
        return not hasattr(manager, "secondary_tiers")

    def _tiers(self) -> list[Any]:
        manager = self._manager()
        if self._is_ours(manager):
            return list(manager.stats)
        return [tier.stats for tier in manager.secondary_tiers]


def drive(connection: socket.socket) -> None:
    """Run an engine. The first line configures the engine, and each further line is a command."""
    commands, answers = connection.makefile("r"), connection.makefile("w")

    def answer(**document: Any) -> None:
        # Send a histogram's value, because ``json`` cannot encode the histogram.
        answers.write(json.dumps(document, default=lambda histogram: histogram.value) + "\n")
        answers.flush()

    try:
        options = json.loads(commands.readline())
        log = os.open(options.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(options.pop("environment"))
        host = Host(**options)
        answer(result=None)
        for line in commands:
            command = json.loads(line)
            answer(result=getattr(host, command.pop("do"))(**command))
        host.shut_down()
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        raise


def import_vllm() -> None:
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.kv_offload.tiering.spec
    import vllm.v1.worker.cpu_worker  # noqa: F401


def main() -> None:
    path = sys.argv[1]
    # Nobody waits for the engines' processes, so the system must reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    import_vllm()
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        if os.fork():
            connection.close()
            continue
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = 1
        try:
            drive(connection)
            status = 0
        except Exception:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            # Skip the interpreter's shutdown, which takes long and would run the parent's handlers.
            os._exit(status)


if __name__ == "__main__":
    main()
