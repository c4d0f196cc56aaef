import pytest
from botocore.exceptions import ClientError
from support.s3_front import S3Front

from kvtier_sdk.testing import TierConformance


@pytest.fixture(scope="module")
def front(server):
    with S3Front(server.port) as front:
        yield front


class TestS3Tier(TierConformance):
    sequences = 5

    @pytest.fixture
    def tier(self, server, front, make_bench):
        self.server, self.front = server, front
        self.bench = make_bench(server)
        self.bench.facts = dict(self.namespace.facts)
        yield self._url()
        if server.pid is None:
            server.start()

    async def read_raw(self, key):
        try:
            return await self.bench.stored(self.bench.name(key))
        except ClientError:
            return None

    async def write_raw(self, key, data):
        await self.bench.overwrite(key, data)

    def break_connection(self):
        self.server.kill()

    def restore_connection(self):
        self.server.start()

    def bad_settings(self):
        return {
            "no such bucket": self.server.tier_url("absent/chunks"),
            "a wrong secret": self._url(secret_access_key="wrong"),
        }

    def _url(self, **options):
        return self.bench.url_of(**{"endpoint": self.front.endpoint, **options})
