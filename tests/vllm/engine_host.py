"""A real engine in a process of its own, driven by one JSON document a line.

Run by ``engine.py``; what the engine prints goes to standard error. The engine core is in this
process, so that a test can look at the tiers' counters and at the caches.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# One thread an engine, and nothing compiled: several engines start one after the other, and each
# serves but a few prompts.
os.environ.update(
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

# A prompt shorter than a block: nothing of it is ever stored.
TICK = [1, 2, 3]


class Host:
    """The engine and what can be asked of it; each public method is a command."""

    def __init__(self, model: str, offloading: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if offloading is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config=offloading,
            )
        self._llm = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            seed=0,
            **options,
        )
        self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 4, **params: Any
    ) -> list[dict[str, Any]]:
        """Serve prompts, all at once; tokens, top-5 logprobs and cached tokens of each."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=5, detokenize=False, **params
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    sorted([token, entry.logprob] for token, entry in step.items())
                    for step in output.outputs[0].logprobs
                ],
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def settle(self) -> None:
        """Step until nothing is under way: nothing does after ``generate`` has returned."""
        core = self._llm.llm_engine.engine_core.engine_core
        self.generate([TICK], max_tokens=1)
        while core.scheduler.has_requests() or self._pending():
            self._llm.llm_engine.step()

    def serve(
        self, prompts: list[list[int]], abort: int, lookahead: int = 0, max_tokens: int = 4
    ) -> dict[str, Any]:
        """Add prompts at once, and abort one of them while its chunks are loaded from a tier.

        Args:
            prompts: added in this order.
            abort: index of the one that is aborted.
            max_tokens: for each.

        Returns:
            By index, the tokens of the others; and whether loads were under way at the abort.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        names = [f"serve-{index}" for index in range(len(prompts))]
        names = [
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling) or name
            for name, prompt in zip(names, prompts, strict=True)
        ]
        tokens: dict[str, list[int]] = {}
        aborted = False
        while engine.has_unfinished_requests():
            if not aborted and self._loading():
                engine.abort_request([names[abort]], internal=True)
                aborted = True
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        return {"aborted_while_loading": aborted, "tokens": tokens}

    def reset_device(self) -> bool:
        """Empty the device cache."""
        return bool(self._llm.reset_prefix_cache())

    def reset_all(self) -> bool:
        """Empty the device cache and the host pool."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def stats(self) -> dict[str, Any]:
        """What the tiers' own counters say, by tier name."""
        from dataclasses import fields

        return {
            tier.name: {field.name: getattr(tier, field.name) for field in fields(tier)}
            for tier in self._tiers()
        }

    def primary_chunks(self) -> int:
        """Chunks in the host pool."""
        manager = self._manager()
        if hasattr(manager, "usage"):
            usage = manager.usage()
            return usage.slots - usage.free
        primary = manager.primary_tier
        return primary._num_chunks - primary._get_num_free_chunks()

    def device_blocks(self) -> int:
        """Blocks in the device's prefix cache."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return len(pool.cached_block_hash_to_block)

    def shut_down(self) -> None:
        """End the engine as an operator would."""
        self._llm.llm_engine.engine_core.shutdown()

    def _pending(self) -> bool:
        connector = self._scheduler.connector
        return connector is not None and connector.has_pending_push_work()

    def _manager(self) -> Any:
        return self._scheduler.connector.connector_scheduler.manager

    def _tiers(self) -> list[Any]:
        manager = self._manager()
        if hasattr(manager, "secondary_tiers"):
            return [tier.stats for tier in manager.secondary_tiers]
        return manager.stats


def main() -> None:
    commands, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")

    def answer(**document: Any) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    try:
        host = Host(**json.loads(commands.readline()))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        raise
    answer(result=None)
    for line in commands:
        command = json.loads(line)
        try:
            result = getattr(host, command.pop("do"))(**command)
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")
            raise
        answer(result=result)
    host.shut_down()
    answers.close()
    # Tearing the interpreter down takes longer than starting it.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
