import pytest

from kvtier_sdk.testing import TierConformance


class TestRedisTier(TierConformance):
    @pytest.fixture
    def tier(self, make_server, server):
        self.make_server = make_server
        self.server = server
        return server.url

    def read_raw(self, key):
        return self.server.ask("GET", self._name(key))

    def write_raw(self, key, data):
        self.server.ask("SET", self._name(key), data)

    def break_connection(self):
        self.server.kill()

    def restore_connection(self):
        self.server.start()

    def freeze(self):
        self.server.pause()

    def unfreeze(self):
        self.server.resume()

    def bad_settings(self):
        guarded = self.make_server("--requirepass", "secret")
        guarded.client_options["password"] = "secret"
        return {"no password": guarded.start().url, "no such database": f"{self.server.url}/4711"}

    def test_maintenance_records_no_use(self, subject):
        version = tuple(map(int, self.server.ask("INFO")["redis_version"].split(".")))
        if version < (7, 2):
            pytest.skip("CLIENT NO-TOUCH came with Redis 7.2")
        super().test_maintenance_records_no_use(subject)

    def small_tier(self, object_bytes):
        full = self.make_server("--maxmemory", str(2**20 + 40 * object_bytes))
        return full.start().url

    def short_lived_tier(self):
        return f"{self.server.url}?ttl=1s"

    def aging_tier(self):
        return f"{self.server.url}?ttl=1s&max_age=2s"

    def _name(self, key):
        return f"kvtier{{}}{self.namespace.fingerprint}:".encode() + key
