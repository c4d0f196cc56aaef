"""Generated workloads. Each workload is hard for some eviction policy."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, islice, takewhile

from kvtier_sdk import EvictionPolicy
from kvtier_sdk.cli.plan.traffic import play
from kvtier_sdk.cli.replay import ReplayRequest, chat_workload
from kvtier_sdk.types import OffloadKey, make_offload_key


class _Source:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._numbers = count()

    def fresh(self, least: int, most: int) -> list[OffloadKey]:
        numbers = islice(self._numbers, self.random.randint(least, most))
        # Make keys random like hashes, because some policies sample chunks by their keys.
        return [make_offload_key(random.Random(number).randbytes(32)) for number in numbers]


_Prompts = Iterator[list[OffloadKey]]


def _loop(source: _Source) -> _Prompts:
    """Request 60 documents of 20 chunks in turn, and sometimes a document that never recurs."""
    documents = [source.fresh(20, 20) for _ in range(60)]
    while True:
        for document in documents:
            yield document + source.fresh(1, 1)
            if source.random.random() < 0.3:
                yield source.fresh(20, 20)


def _scans(source: _Source) -> _Prompts:
    """Request 40 popular prompts, and sometimes many long prompts that never recur."""
    hot = [source.fresh(10, 10) for _ in range(40)]
    while True:
        for _ in range(160):
            yield source.random.choice(hot) + source.fresh(1, 10)
        for _ in range(15):
            yield source.fresh(30, 30)


def _popular(source: _Source, shift_after: int) -> _Prompts:
    """Request 1,000 documents, whose popularity shifts every ``shift_after`` requests."""
    documents = [source.fresh(5, 20) for _ in range(1000)]
    weights = list(accumulate(1 / rank**0.9 for rank in range(1, 1001)))
    while True:
        source.random.shuffle(documents)
        for _ in range(shift_after):
            yield source.random.choices(documents, cum_weights=weights)[0] + source.fresh(1, 2)


def _news(source: _Source) -> _Prompts:
    """Request the latest 300 documents. New documents replace the oldest documents."""
    latest = [source.fresh(5, 20) for _ in range(300)]
    while True:
        latest.pop(0)
        latest.append(source.fresh(5, 20))
        for _ in range(2):
            yield source.random.choice(latest) + source.fresh(2, 2)


def _agents(source: _Source, kinds: int, alive: int) -> _Prompts:
    """Simulate agents. All agents of a kind start with the same long prompt; each extends it."""
    prompts = [source.fresh(30, 120) for _ in range(kinds)]
    tasks: list[tuple[list[OffloadKey], int]] = []
    while True:
        while len(tasks) < alive:
            kind = min(int(source.random.expovariate(4 / kinds)), kinds - 1)
            tasks.append((list(prompts[kind]), source.random.randint(2, 12)))
        prompt, steps = tasks.pop(source.random.randrange(len(tasks)))
        prompt += source.fresh(1, 4)
        yield list(prompt)
        if steps > 1:
            tasks.append((prompt, steps - 1))


def _pauses(source: _Source) -> _Prompts:
    """Simulate chats of 400 people; a person answers after a pause, or begins a new chat."""
    system = source.fresh(3, 3)
    turns = [(source.random.expovariate(1 / 200), person) for person in range(400)]
    heapq.heapify(turns)
    chats: dict[int, list[OffloadKey]] = {}
    while True:
        now, person = heapq.heappop(turns)
        chat = chats.setdefault(person, list(system))
        chat += source.fresh(1, 8) if len(chat) > len(system) else source.fresh(1, 40)
        yield list(chat)
        if source.random.random() < 0.3:
            del chats[person]
        heapq.heappush(turns, (now + source.random.lognormvariate(5, 1), person))


def _phases(source: _Source) -> _Prompts:
    while True:
        for prompts in (_pauses, _loop, _news, _scans):
            yield from islice(prompts(source), 1000)


_PROMPTS: dict[str, Callable[[_Source], _Prompts]] = {
    "loop": _loop,
    "scans": _scans,
    "popular": lambda source: _popular(source, shift_after=100_000),
    "shifting popularity": lambda source: _popular(source, shift_after=600),
    "news": _news,
    "agents": lambda source: _agents(source, kinds=30, alive=20),
    "many agents": lambda source: _agents(source, kinds=200, alive=60),
    "pauses": _pauses,
    "phases": _phases,
}
#: For each workload, the pool sizes to try, in slots: from too small to almost sufficient.
WORKLOADS = {
    "chats": (300, 600, 1200),
    "loop": (300, 600, 1500),
    "scans": (200, 400, 800),
    "popular": (300, 1000, 3000),
    "shifting popularity": (300, 1000, 3000),
    "news": (300, 1000, 2500),
    "agents": (300, 1000, 2500),
    "many agents": (500, 1500, 4000),
    "pauses": (500, 2000, 6000),
    "phases": (300, 1000, 3000),
}


def generate(name: str, requests: int, seed: int) -> list[ReplayRequest]:
    if name == "chats":
        return chat_workload(requests, seed)
    prompts = islice(_PROMPTS[name](_Source(seed)), requests)
    return [
        ReplayRequest(f"{name}-{n}", tuple(prompt), arrived_s=float(n))
        for n, prompt in enumerate(prompts)
    ]


def count_hits(workload: Sequence[ReplayRequest], policy: EvictionPolicy, slots: int) -> int:
    """Count the hits of a simulated host pool without tiers."""
    return sum(
        sum(1 for _ in takewhile(held.__contains__, request.keys))
        for request, held in zip(workload, play(workload, policy, slots), strict=True)
    )
