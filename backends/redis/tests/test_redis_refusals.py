import asyncio
import contextlib
import socket
import traceback

import pytest

from kvtier_redis.faults import SettingError, reply_error
from kvtier_sdk import (
    ConfigError,
    CorruptChunkError,
    HostPool,
    Namespace,
    PoolLayout,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierUnavailableError,
    Usage,
)
from kvtier_sdk.engine import TierListener, open_tier

KEYS = [index.to_bytes(20, "big") for index in range(20)]


@pytest.fixture
def guarded(make_server, rights):
    user = ["--user", "kv", "on", ">secret", "~kvtier*", *rights.everywhere]
    server = make_server("--requirepass", "admin", *user)
    server.client_options["password"] = "admin"
    return server.start()


def with_user(server, user="kv", password="secret") -> str:
    return f"redis://{user}:{password}@127.0.0.1:{server.port}"


async def test_an_acl_user_with_what_the_readme_names(bench, guarded):
    tier = await bench.open(with_user(guarded), ttl="1h", max_age="2h")
    assert await bench.put(tier, *KEYS) == [None] * 20
    assert await bench.loads(tier, *KEYS)
    assert await bench.has(tier, KEYS[0]) == [True]
    await tier.touch(KEYS)
    assert len([entry async for entry in tier.scan()]) == 20
    await tier.delete(KEYS[:1])
    assert (await tier.usage()).chunks == 40  # 19 chunks, 20 marks and the manifest
    forever = await bench.open(with_user(guarded))
    await forever.touch(KEYS)


async def test_a_password_alone_is_the_default_users(bench, guarded):
    tier = await bench.open(f"redis://:admin@127.0.0.1:{guarded.port}")
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, KEYS[0])


@pytest.mark.parametrize(
    ("user", "password", "says"),
    [("kv", "wrong", "invalid username-password pair"), ("nobody", "secret", "WRONGPASS|invalid")],
)
async def test_wrong_credentials(bench, guarded, user, password, says):
    with pytest.raises(TierAuthError, match=says) as caught:
        await bench.open(with_user(guarded, user, password))
    assert not caught.value.retryable
    assert "secret" not in str(caught.value)


async def test_without_info_keys_are_counted(bench, guarded):
    guarded.ask("ACL", "SETUSER", "kv", "-info")
    tier = await bench.open(with_user(guarded))
    assert await bench.put(tier, KEYS[0]) == [None]
    # DBSIZE counts every key, so the manifest counts too.
    assert await tier.usage() == Usage(2, 2 * bench.object_bytes, None)
    guarded.ask("ACL", "SETUSER", "kv", "-dbsize")
    with pytest.raises(TierAuthError):
        await tier.usage()


async def test_info_may_have_another_name(bench, make_server):
    tier = await bench.open(make_server("--rename-command", "INFO", "").start().url)
    assert await bench.put(tier, *KEYS) == [None] * 20
    assert await bench.loads(tier, *KEYS)
    assert await tier.usage() == Usage(21, 21 * bench.object_bytes, None)


@pytest.fixture
async def start_talker():
    servers = []

    async def start(text: bytes) -> str:
        async def serve(reader, writer):
            with contextlib.suppress(OSError):
                while await reader.read(10_000):
                    writer.write(text)
                    await writer.drain()
            writer.close()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return f"redis://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("more", ["", "cluster=yes", "sentinel=kv"])
@pytest.mark.parametrize(
    "text", [b"*1\r\n" * 5000, b"*1\r\n$x\r\n", b"*0\r\n", b"!\r\n", b":1\r\n"], ids=repr
)
async def test_replies_that_make_no_sense(bench, start_talker, text, more):
    with pytest.raises((TierUnavailableError, ConfigError)):
        await bench.open(f"{await start_talker(text)}?connect_timeout=500ms&{more}")


async def test_every_command_translates_a_refusal_alike(bench, guarded):
    tier = await bench.open(with_user(guarded), ttl="1h", connect_timeout="300ms")
    await bench.put(tier, KEYS[0])

    async def errors() -> list[TierError]:
        found = [*await bench.put(tier, KEYS[0]), *await tier.load([bench.empty(KEYS[0])])]
        for call in (
            lambda: bench.has(tier, KEYS[0]),
            lambda: tier.touch(KEYS),
            lambda: tier.delete(KEYS),
            lambda: anext(tier.scan()),
            tier.usage,
        ):
            with pytest.raises(TierError) as caught:
                await call()
            found.append(caught.value)
        return found

    guarded.ask("ACL", "SETUSER", "kv", "nocommands")
    assert {type(error) for error in await errors()} == {TierAuthError}
    guarded.ask("ACL", "SETUSER", "kv", "+@all")
    assert await bench.loads(tier, KEYS[0])
    guarded.kill()
    assert {type(error) for error in await errors()} == {TierUnavailableError}


async def test_a_replica_takes_no_stores(bench, server, make_server):
    tier = await bench.open(server.url)
    await bench.put(tier, KEYS[0])
    other = make_server().start()
    server.ask("REPLICAOF", "127.0.0.1", other.port)
    (stored,) = await bench.put(tier, KEYS[1])
    assert isinstance(stored, TierUnavailableError)
    with pytest.raises(TierUnavailableError):
        await tier.delete(KEYS)
    server.ask("REPLICAOF", "NO", "ONE")
    assert await bench.put(tier, KEYS[1]) == [None]


async def test_a_server_that_is_still_loading(bench, make_server):
    server = make_server("--key-load-delay", "0", "--loading-process-events-interval-bytes", "1024")
    server.start()
    tier = await bench.open(server.url, connections=1)
    await bench.put(tier, *KEYS)
    server.ask("SAVE")
    server.kill()
    # A delay for each key makes the loading take seconds.
    server.options += ["--key-load-delay", "100000"]
    server.start(ready=lambda: server.is_loading())
    (loaded,) = await tier.load([bench.empty(KEYS[0])])
    (stored,) = await bench.put(tier, KEYS[0])
    assert isinstance(loaded, TierUnavailableError)
    assert isinstance(stored, TierUnavailableError)
    with pytest.raises(TierUnavailableError):
        await bench.has(tier, KEYS[0])
    server.wait_until(lambda: not server.is_loading(), "it has loaded")
    assert await bench.loads(tier, *KEYS)


async def test_too_many_clients(bench, make_server):
    server = make_server().start()
    tier = await bench.open(server.url, connections=4)
    # redis-py uses the only connection that the server allows, so chunks have no connection.
    server.ask("CONFIG", "SET", "maxclients", 1)
    refused = await bench.put(tier, *KEYS)
    assert {type(verdict) for verdict in refused} == {TierUnavailableError}
    assert "max number of clients" in str(refused[0])


async def test_a_node_of_a_cluster_without_the_option(bench, make_server):
    server = make_server("--cluster-enabled", "yes").start()
    with pytest.raises(ConfigError, match="set option 'cluster' to true"):
        await bench.open(server.url)


@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        ("OOM command not allowed", TierCapacityError, False),
        ("NOAUTH Authentication required.", TierAuthError, False),
        ("WRONGPASS invalid", TierAuthError, False),
        ("NOPERM this user", TierAuthError, False),
        ("ERR invalid password", TierAuthError, False),
        ("LOADING Redis is loading", TierUnavailableError, True),
        ("READONLY You can't write", TierUnavailableError, True),
        ("MASTERDOWN Link with MASTER", TierUnavailableError, True),
        ("CLUSTERDOWN The cluster is down", TierUnavailableError, True),
        ("TRYAGAIN Multiple keys", TierUnavailableError, True),
        ("BUSY Redis is busy", TierUnavailableError, True),
        ("MISCONF Redis is configured", TierUnavailableError, True),
        ("NOREPLICAS Not enough", TierUnavailableError, True),
        ("ERR max number of clients reached", TierUnavailableError, True),
        ("WRONGTYPE Operation against", CorruptChunkError, False),
        ("ERR unknown command", TierError, False),
        ("MOVED 3999 127.0.0.1:6381", SettingError, False),
    ],
)
def test_every_error_reply_has_its_error(answer, kind, retryable):
    error = reply_error(answer)
    assert type(error) is kind
    assert error.retryable is retryable
    assert answer in str(error) or "option 'cluster'" in str(error)


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_server_that_quotes_the_password(make_server, caplog, runner):
    server = make_server("--rename-command", "HELLO", "", "--rename-command", "AUTH", "")

    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", server.port)) == 0

    server.start(listens)
    url = f"redis://kv:hunter2@127.0.0.1:{server.port}?runner={runner}"
    pool = HostPool.create(PoolLayout(1, 4096))
    try:
        with (
            pytest.raises(TierError, match=r"unknown command .*\*\*\*") as caught,
            open_tier(url, pool, Namespace({}), TierListener()),
        ):
            pass
    finally:
        pool.close()
    assert "hunter2" not in "".join(traceback.format_exception(caught.value)) + caplog.text
