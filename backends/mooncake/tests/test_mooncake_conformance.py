import pytest
from support.mooncake_store import MooncakeStore

from kvtier_sdk.testing import CHECKS, TierConformance, TierSubject


class TestMooncakeTier(TierConformance):
    sequences = 3  # few, because closing a client takes a second

    @pytest.fixture
    def tier(self, store):
        self.store = store
        return f"{store.url}?timeout=1s"

    def read_raw(self, key):
        return self._node.ask("get", self._name(key)) or None

    def write_raw(self, key, data):
        self._node.ask("remove", self._name(key), True)
        return self._node.ask("put", self._name(key), data) == 0

    def break_connection(self):
        self.store.kill_master()

    def restore_connection(self):
        self.store.start_master()

    def freeze(self):
        self.store.pause()

    def unfreeze(self):
        self.store.resume()

    def bad_settings(self):
        return {"a device that is not there": f"{self.store.url}?protocol=rdma&devices=mlx5_9"}

    @property
    def _node(self):
        return self.store.nodes[0]

    def _name(self, key):
        return f"kvtier/{self.namespace.fingerprint}/{key.hex()}"


async def test_a_full_store(client, tmp_path):
    # Use large chunks: chunks of the default size would not fill even the smallest node.
    store = MooncakeStore(tmp_path, segment_bytes=16 * 2**20).start()
    try:
        subject = TierSubject(
            store.url, chunk_bytes=300_000, small_tier=lambda object_bytes: store.url
        )
        await CHECKS["check_a_full_tier_refuses_or_makes_room"].run(subject)
    finally:
        store.kill()
