"""One simulation: a manager, its tiers and an engine, from set-up to end."""

from __future__ import annotations

import logging
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from kvtier_sdk.codecs.planes import Planes
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import CorruptChunkError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.pool import HostPool
from kvtier_sdk.registry import load_policy
from kvtier_sdk.runner import TierLoop, compression
from kvtier_sdk.runner.jobs import Operation, Report
from kvtier_sdk.testing.virtual_clock import VirtualClock
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.outputs import ResetScope
from kvtier_sdk.types import OffloadKey, Transfer
from support.simulation.breach import Breach, Journal, short
from support.simulation.chunks import ChunkTree
from support.simulation.device import Device
from support.simulation.engine import Engine
from support.simulation.faults import Weather
from support.simulation.hints import HintGiver
from support.simulation.inside import Inside
from support.simulation.ledger import Ledger, WatchedRunner
from support.simulation.plan import CHUNK_BYTES, Plan, TierPlan, draw_plan
from support.simulation.receipts import HintRecord
from support.simulation.report import SimulationReport
from support.simulation.rules import Rules
from support.simulation.spilling import SpillRule
from support.simulation.tier import PaddedSimulatedTier, SimulatedTier, SimulatedTierConfig
from support.simulation.watches import WatchedMemory, WatchedPolicy

POLICIES = ("returns", "lru", "arc")
#: After the last fault, all requests must end within this number of steps.
_LAST_STEPS = 400
_CALM_STEP_S = 0.02
#: The longest stall of a tier's loop. After 1 s, the manager would end overdue jobs.
_LONGEST_STALL_S = 0.8
_LONGEST_STALL_STEPS = 15
#: The longest simulated duration of a function in a thread.
_LONGEST_CALL_S = 0.002
#: The duration of a lull, a pause of the engine after a step.
_LULL_S = 1.0
#: Enough time for each breaker to close: the longest interval between probes, plus one probe.
_RECOVERY_S = 2.0


def simulate(seed: int, *, echo: Callable[[str], None] | None = None) -> SimulationReport:
    with _errors_of_the_sdk(lambda message: world.note_error(message)):
        world = World(seed, echo)
        # Real threads would finish at moments that the seed does not determine.
        with patch.object(compression, "run_blocking", world.run_blocking):
            try:
                world.play()
            except Exception as error:
                world.discard()
                raise world.explain(error) from error
            finally:
                world.close()
    return world.report()


class World:
    def __init__(self, seed: int, echo: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self._first_breach: Breach | None = None
        rng = random.Random(seed)
        self.plan: Plan = draw_plan(rng, POLICIES)
        self.clock = VirtualClock()
        self.journal = Journal(self.clock.now_s, echo)
        self.rng = rng
        self.pool = HostPool(self.plan.slots, CHUNK_BYTES)
        self.tree = ChunkTree(self.plan.groups, self.plan.depth, CHUNK_BYTES, rng)
        self.device = Device(self.pool, self.tree.content, rng, self.breach)
        self.memory = WatchedMemory(self.pool)
        self.spills = SpillRule(self.breach)
        real_policy = load_policy(self.plan.policy)()
        real_policy.open(self.plan.slots)
        self.policy = WatchedPolicy(
            real_policy, self.breach, self._chunk_arrived, self._chunk_left, self._chunks_used
        )
        self.hints = HintGiver(seed)
        self.manager = TieringManager(
            self.pool,
            policy=self.policy,
            clock=self.clock,
            store_reserve=self.plan.store_reserve,
            events=True,
            one_copy=self.plan.one_copy,
            recompute_s=self.plan.recompute_s,
            hint_share=self.hints.share,
            hint_duration_s=self.hints.longest_s,
        )
        self.inside = Inside(self.manager)
        # In some simulations only a few chunks can be looked up at once.
        limited = random.Random(f"limit {seed}")
        if limited.random() < 0.3:
            self.inside.limit_lookups(limited.randint(1, 6))
        self._tier_rngs: list[random.Random] = []
        self.weathers: list[Weather] = []
        self.ledgers: list[Ledger] = []
        self.runners: list[WatchedRunner] = []
        # In some simulations an operator drains and resumes tiers.
        self._operator = random.Random(f"operator {seed}")
        self._moves_rate = self._operator.choice([0.0, 0.0, 0.05])
        self._compressor = random.Random(f"compress {seed}")
        self._stalled_until: list[int] = []
        self.tiers: list[SimulatedTier] = []
        self.loops: list[TierLoop] = []
        for tier_plan in self.plan.tiers:
            self._add_tier(tier_plan)
        self.spills.watch(self.inside, self.ledgers)
        self.counts: Counter[str] = Counter()
        self.record = HintRecord(self)
        for ledger in self.ledgers:
            ledger.withheld = self.record.withheld
        self.engine = Engine(self)
        self.rules = Rules(self)

    def _compress(self) -> str:
        chosen = self._compressor.choice(["always", "never"])
        # Draw "auto" rarely, so that seeds known to find a bug still find it.
        return "auto" if chosen == "always" and self.seed % 8 == 7 else chosen

    def breach(self, rule: str, message: str) -> None:
        """Raise a breach; the end of the step raises it again, in case a runner has caught it."""
        breach = Breach(rule, message)
        self._first_breach = self._first_breach or breach
        raise breach

    async def run_blocking(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function as :func:`kvtier_sdk.run_blocking` does, but in virtual time."""
        await self.clock.sleep(self._compressor.uniform(0, _LONGEST_CALL_S))
        return function(*arguments)

    def note_error(self, message: str) -> None:
        """Treat a logged error as a breach, because a tier's faults must cause warnings at most."""
        self._first_breach = self._first_breach or Breach("nothing fails inside the SDK", message)

    def explain(self, error: Exception) -> Breach:
        raised = Breach("the manager never raises", f"{type(error).__name__}: {error}")
        breach = self._first_breach or raised
        breach.seed = self.seed
        breach.step = self.engine.step
        breach.actions = self.journal.last()
        return breach

    def discard(self) -> None:
        for runner in self.runners:
            runner.discard()

    def close(self) -> None:
        self.device.close()
        self.memory.release()
        self.pool.close()

    def play(self) -> None:
        for _ in range(self.plan.steps):
            self._step()
        if self.plan.ends == "shut down":
            self._shut_down(self.rng.choice([0.0, 0.05, 10.0]))
        else:
            self._come_to_rest()
            self._check_sums()
            self._shut_down(10.0)
            if any(ledger.busy for ledger in self.ledgers):
                self.breach("at rest nothing is left", "I/O goes on after the end")
        self._raise_first_breach()

    def _check_sums(self) -> None:
        """Check that the outcome of each lookup is counted exactly once."""
        host, *tiers = self.manager.stats
        hits = sum(stats.hit_chunks for stats in self.manager.stats)
        misses = sum(host.misses.values())
        asked = (self.engine.counts["chunks loaded"], len(self.engine.missed))
        if (hits, misses) != asked:
            self.breach("counts add up", f"{hits} hits and {misses} misses, in truth {asked}")
        for tier in tiers:
            failed = sum(n for key, n in tier.failures.items() if key.startswith("lookup."))
            dropped = tier.dropped["lookup.unavailable"]
            answered = tier.found_chunks + tier.absent_chunks + failed + dropped
            if answered != tier.lookup_chunks:
                self.breach(
                    "counts add up",
                    f"{tier.name}: {tier.lookup_chunks} chunks looked up, {answered} counted",
                )

    def report(self) -> SimulationReport:
        counts = Counter(self.engine.counts)
        for ledger, weather in zip(self.ledgers, self.weathers, strict=True):
            counts.update(ledger.counts)
            counts.update({f"trouble: {kind}": n for kind, n in weather.seen.items()})
        for stats in self.manager.stats:
            counts.update({f"miss: {reason}": n for reason, n in stats.misses.items()})
            counts.update({f"dropped: {reason}": n for reason, n in stats.dropped.items()})
        counts[f"ends: {self.plan.ends}"] += 1
        counts[f"policy: {self.plan.policy}"] += 1
        for tier in self.plan.tiers:
            counts[f"store policy: {tier.options['store_policy']}"] += 1
        return SimulationReport(
            1, self.engine.step, self.clock.now_s(), counts, self._digest(counts)
        )

    def _digest(self, counts: Counter[str]) -> int:
        drawn = [rng.random() for rng in (self.rng, *self._tier_rngs)]
        return zlib.crc32(repr((sorted(counts.items()), self.clock.now_s(), drawn)).encode())

    # --- set-up -------------------------------------------------------------------------------

    def _add_tier(self, plan: TierPlan) -> None:
        rng = random.Random(self.rng.getrandbits(64))
        self._tier_rngs.append(rng)
        weather = Weather(plan, rng, self.clock)
        ledger = Ledger(plan.name, self.clock, self.device.holds, self.breach)
        tier_class = PaddedSimulatedTier if plan.padded else SimulatedTier
        object_bytes = 128 + 640 if plan.padded else 64 + CHUNK_BYTES
        capacity = plan.capacity_chunks
        index = len(self.tiers)

        def on_open(tier: SimulatedTier) -> None:
            self.tiers[index] = tier

        spec = TierSpec(
            plan.name,
            "simulated",
            tier_class,
            SimulatedTierConfig(
                capacity=None if capacity is None else capacity * object_bytes,
                ttl=None,
                max_age=None,
                latency=0.0,
                bandwidth=None,
                weather=weather,
                on_touch=self._watch_io(ledger),
                on_put=ledger.put,
                on_open=on_open,
                on_broken_promise=partial(self.breach, "a call keeps what the contract promises"),
                rng=rng,
            ),
            RunnerOptions.model_validate({"compress": self._compress(), **plan.options}),
        )

        def make_loop(report: Callable[[Report], None]) -> TierLoop:
            loop = TierLoop(
                spec,
                namespace=Namespace({"dtype": "bfloat16"}),
                memory=self.memory,  # type: ignore[arg-type]  # a loop needs no more
                clock=self.clock,
                report=report,
                rng=rng,
            )
            tier = loop.call.tier
            assert isinstance(tier, SimulatedTier)
            self.tiers.append(tier)
            self.loops.append(loop)
            return loop

        runner = WatchedRunner(
            make_loop, self.clock, ledger, self.journal.note, let_go=weather.clear_up, rng=rng
        )
        self.manager.add_tier(spec, runner)  # type: ignore[arg-type]  # it has no thread
        self.weathers.append(weather)
        self.ledgers.append(ledger)
        self.runners.append(runner)
        self._stalled_until.append(0)

    def _watch_io(self, ledger: Ledger) -> Callable[[Operation, Transfer], None]:
        def on_touch(operation: Operation, transfer: Transfer) -> None:
            key = transfer.key
            if key not in self.tree.content:
                return  # a breaker's probe
            # The payload is in no slot if it is compressed.
            slot = self.memory.slot_of(transfer.payload)
            what = f"{ledger.name} {operation.value} of {short(key)}, slot {slot}"
            if not ledger.may_touch(operation, slot, key):
                self.breach("I/O ends with its job", what)
            if operation is Operation.LOAD:
                return
            ledger.counts["chunks stored compressed"] += slot is None
            if slot is None:
                holds = self._expands_to(transfer.payload, key)
            else:
                holds = self.device.holds(slot, key)
            if not holds:
                self.breach("what is stored under a key is its chunk", what)

        return on_touch

    def _expands_to(self, payload: memoryview, key: OffloadKey) -> bool:
        content = bytearray(CHUNK_BYTES)
        content[: len(payload)] = payload
        try:
            Planes.decode(memoryview(content), len(payload), CHUNK_BYTES)
        except CorruptChunkError:
            return False
        return content == self.tree.content[key]

    @contextmanager
    def resetting(self, scope: ResetScope) -> Iterator[None]:
        self.rules.before_reset()
        for ledger in self.ledgers:
            ledger.reset(tiers_too=scope is ResetScope.ALL)
        self.spills.resetting = True
        self.record.reset()
        yield
        self.spills.resetting = False
        self.record.reset_ended()

    def _chunk_arrived(self, key: OffloadKey) -> None:
        self.spills.arrived(key)
        self.record.arrived(key)

    def _chunk_left(self, key: OffloadKey) -> None:
        if key not in self.record.leases.purged:
            self.spills.left(key)
        self.record.left(key)

    def _chunks_used(self, keys: Sequence[OffloadKey]) -> None:
        self.record.leases.used(keys)

    # --- playing ------------------------------------------------------------------------------

    def _step(self, *, calm: bool = False) -> None:
        self.journal.step = self.engine.step + 1
        self.engine.run_step(arrivals=not calm)
        self.spills.step_ended(self.policy.known)
        if self.rng.random() < 0.1 and not self.manager.has_pending_work():
            self.rules.check_idle()
        self.rules.check()
        if calm:
            self._run_tiers(_CALM_STEP_S)
            # Extend the limits on waits: a calm step may be longer than the plan's longest step.
            longer_s = max(0.0, _CALM_STEP_S - self.plan.step_s)
            self.engine.excuse(longer_s * len(self.runners))
        else:
            self._weather()
            stalled = [until > self.engine.step for until in self._stalled_until]
            self._run_tiers(self.rng.uniform(0, self.plan.step_s), stalled)
            if self.rng.random() < self.plan.lull_rate:
                self.journal.note("lull")
                # Make a step if work is pending, as an engine does before it sleeps.
                if self.manager.has_pending_work():
                    self.engine.end_step()
                    self.manager.has_pending_work()
                self._run_tiers(_LULL_S)
                self.engine.excuse(_LULL_S * len(self.runners))
        self._raise_first_breach()

    def _raise_first_breach(self) -> None:
        if self._first_breach is not None:
            raise self._first_breach

    def _run_tiers(self, duration_s: float, stalled: Sequence[bool] = ()) -> None:
        for index in self.rng.sample(range(len(self.runners)), len(self.runners)):
            if any(stalled[index : index + 1]):
                self.clock.advance(duration_s)
                continue
            self.runners[index].run_for(duration_s)
            self.ledgers[index].check_deadlines()

    def _weather(self) -> None:
        for index, plan in enumerate(self.plan.tiers):
            weather, tier = self.weathers[index], self.tiers[index]
            if self.rng.random() < plan.stalls and self._stalled_until[index] < self.engine.step:
                self.journal.note(plan.name, "stands still")
                weather.seen["stall"] += 1
                longest = int(_LONGEST_STALL_S / self.plan.step_s / len(self.runners))
                steps = self.rng.randint(1, min(longest, _LONGEST_STALL_STEPS))
                self._stalled_until[index] = self.engine.step + steps
            if self.rng.random() < plan.outages:
                self.journal.note("outage of", plan.name)
                weather.begin_outage()
            if self.rng.random() < plan.removals:
                tier.lose()
            if self._operator.random() < self._moves_rate:
                client = self.manager.clients[index]
                client.is_drained = not client.is_drained
                self.journal.note(plan.name, "is out" if client.is_drained else "is back")
                weather.seen["taken out"] += client.is_drained

    def _come_to_rest(self) -> None:
        for weather in self.weathers:
            weather.clear_up()
        for client in self.manager.clients:
            client.is_drained = False
        if self.plan.ends == "aborted":
            self.engine.abort_all()
        self._play_until_idle()
        self._run_tiers(_RECOVERY_S)
        # Play on, because the manager may still have to report uses, and to read tiers' reports.
        self._play_until_idle()
        self.rules.check_rest()
        for tier, loop in zip(self.inside.tiers, self.loops, strict=True):
            is_over = loop.call.quarantine is not None
            client = tier.client
            if not (client.takes_reads and client.takes_stores) and not is_over:
                self.breach("a breaker closes without traffic", client.spec.name)

    def _play_until_idle(self) -> None:
        for _ in range(_LAST_STEPS):
            self._step(calm=True)
            busy = self.engine.requests or self.device.all or self.manager.has_pending_work()
            if not busy and not any(ledger.held for ledger in self.ledgers):
                return
        left = [request.context.request_id for request in self.engine.requests]
        jobs = [ledger.describe() for ledger in self.ledgers if ledger.held]
        self.breach(
            "nothing waits for ever",
            f"after {_LAST_STEPS} calm steps there are left: {left} {jobs}, "
            f"{len(self.device.all)} copies",
        )

    def _shut_down(self, timeout_s: float) -> None:
        self.journal.note("shutdown", timeout_s)
        self.manager.shutdown(timeout_s)
        for ledger in self.ledgers:
            if ledger.running or ledger.pending:
                self.breach("a job ends in one result", f"after the end: {ledger.describe()}")


@contextmanager
def _errors_of_the_sdk(on_error: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_error`` with each error that the SDK logs."""
    log = logging.getLogger("kvtier")
    handler = _Listener(on_error)
    before = log.propagate, log.level
    log.propagate = False
    log.setLevel(logging.ERROR)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate, level = before
        log.setLevel(level)


class _Listener(logging.Handler):
    def __init__(self, on_error: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._on_error = on_error

    def emit(self, record: logging.LogRecord) -> None:
        self._on_error(self.format(record))
