"""The manager tells the eviction policy each chunk's parent and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from kvtier_sdk import EvictionPolicy, HostPool, OffloadKey, RequestContext, make_offload_key
from kvtier_sdk.engine import TieringManager
from kvtier_sdk.testing import VirtualClock


class RecordingPolicy(EvictionPolicy):
    uses_prefix = True

    def __init__(self) -> None:
        self.places: dict[OffloadKey, tuple[OffloadKey | None, int]] = {}

    def on_insert(
        self, key: OffloadKey, parent: OffloadKey | None, position: int, request: RequestContext
    ) -> None:
        self.places[key] = parent, position

    def on_access(self, key: OffloadKey) -> None:
        assert key in self.places

    def on_remove(self, key: OffloadKey) -> None:
        del self.places[key]

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        return []


def key_of(path: str) -> OffloadKey:
    return make_offload_key(path.encode().ljust(32, b"."))


def serve(manager: TieringManager, path: str) -> None:
    request = RequestContext(path)
    keys: Sequence[OffloadKey] = [key_of(path[: end + 1]) for end in range(len(path))]
    manager.on_new_request(request)
    hits, _ = manager.lookup_prefix(keys, request)
    output = manager.prepare_store(keys[hits:], request)
    manager.complete_store(output.keys_to_store, request)
    manager.on_request_finished(request)
    manager.on_schedule_end()


def test_a_policy_is_told_parents_and_positions() -> None:
    policy = RecordingPolicy()
    with closing(HostPool(8, 64)) as pool:
        manager = TieringManager(pool, policy=policy, clock=VirtualClock())
        for path in ("123", "1245"):
            serve(manager, path)
        manager.shutdown(1.0)
    assert policy.places == {
        key_of("1"): (None, 0),
        key_of("12"): (key_of("1"), 1),
        key_of("123"): (key_of("12"), 2),
        key_of("124"): (key_of("12"), 2),
        key_of("1245"): (key_of("124"), 3),
    }
