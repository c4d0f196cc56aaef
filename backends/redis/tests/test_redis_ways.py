import asyncio
import contextlib
import re
import ssl
import subprocess
from types import SimpleNamespace

import pytest
from support.papers import make_papers

from kvtier_redis.connector import Connector
from kvtier_redis.dispatcher import Dispatcher
from kvtier_redis.resp import Exchange
from kvtier_redis.routes import OneServer, _Sentinels
from kvtier_sdk import (
    ConfigError,
    SystemClock,
    TierAuthError,
    TierError,
    TierSpec,
    TierUnavailableError,
)

# Do not delay the sync of a replica, because a replica cannot take over before its sync.
AT_ONCE = ["--repl-diskless-sync-delay", "0"]

KEYS = [b"chunk %03d" % index for index in range(120)]


@pytest.fixture(scope="session")
def papers(tmp_path_factory) -> SimpleNamespace:
    return make_papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture
def start_tls(make_server, papers):
    def start(*options: str):
        server = make_server(*options)
        cert, key = papers.server
        server.options = [
            *["--port", "0", "--tls-port", str(server.port), "--bind", "127.0.0.1"],
            *["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", papers.ca],
            *(options or ["--tls-auth-clients", "no"]),
        ]
        cert, key = papers.client
        server.client_options |= {"ssl": True, "ssl_ca_certs": papers.ca}
        server.client_options |= {"ssl_certfile": cert, "ssl_keyfile": key}
        return server.start()

    return start


@pytest.mark.parametrize("chunk_bytes", [1, 2**22 + 1])
async def test_tls_with_a_private_ca(bench, start_tls, papers, chunk_bytes):
    server = start_tls()
    bench.chunk_bytes = chunk_bytes
    tier = await bench.open(f"rediss://localhost:{server.port}", tls_ca=papers.ca)
    assert await bench.put(tier, *KEYS[:8]) == [None] * 8
    assert await bench.loads(tier, *KEYS[:8])
    assert await bench.has(tier, *KEYS[:9]) == [True] * 8 + [False]
    assert server.ask("GET", bench.name(KEYS[0])) == bench.content(KEYS[0])


async def test_tls_with_a_certificate_that_is_not_trusted(bench, start_tls):
    server = start_tls()
    url = f"rediss://127.0.0.1:{server.port}"
    with pytest.raises(TierUnavailableError, match=r"not trusted: .* option 'tls_ca'") as caught:
        await bench.open(url)
    assert not caught.value.retryable
    tier = await bench.open(url, tls_verify="no")
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, KEYS[0])


async def test_tls_to_a_host_that_its_certificate_does_not_name(bench, start_tls, papers):
    server = start_tls("--bind", "127.0.0.1", "127.0.0.2", "--tls-auth-clients", "no")
    with pytest.raises(TierUnavailableError, match=r"is for another host; .*'tls_verify'"):
        await bench.open(f"rediss://127.0.0.2:{server.port}", tls_ca=papers.ca)


async def test_tls_with_a_certificate_of_our_own(bench, start_tls, papers):
    server = start_tls("--tls-auth-clients", "yes")
    url = f"rediss://127.0.0.1:{server.port}?tls_ca={papers.ca}"
    with pytest.raises(TierUnavailableError, match=r"options 'tls_cert' and 'tls_key'"):
        await bench.open(url)
    cert, key = papers.client
    with pytest.raises(ConfigError, match=r"option 'tls_cert': .* option 'tls_key'"):
        await bench.open(url, tls_cert=cert)
    tier = await bench.open(url, tls_cert=cert, tls_key=key)
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, KEYS[0])


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_a_cancellation_over_tls(bench, start_tls, papers, operation):
    bench.chunk_bytes = 32 * 2**20
    server = start_tls()
    tier = await bench.open(f"rediss://127.0.0.1:{server.port}", tls_ca=papers.ca, connections=1)
    await bench.put(tier, KEYS[0])
    transfer = bench.full(KEYS[0], seed=1)
    task = asyncio.create_task(getattr(tier, operation)([transfer]))
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    transfer.payload[:] = b"n" * len(transfer.payload)
    assert await bench.loads(tier, KEYS[0])
    assert bytes(transfer.payload) == b"n" * len(transfer.payload)


async def test_a_server_that_signs_in_and_hangs_up(papers):
    times = 0

    async def serve(reader, writer):
        nonlocal times
        times += 1
        await reader.read(100)
        writer.write(b"+OK\r\n")
        writer.close()

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*papers.server)
    peer = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = peer.sockets[0].getsockname()[1]
    config = TierSpec.from_url(f"rediss://:p@127.0.0.1:{port}", tls_ca=papers.ca).config
    clock, route = SystemClock(), OneServer(config)
    connect = Connector(config, clock).connect
    dispatcher = Dispatcher(route, connect, connections=1, turn=10, share=1, clock=clock)
    requests = [Exchange(key, [b"request"]) for key in KEYS[:8]]
    async with asyncio.timeout(20):
        await dispatcher.run(requests)
    assert {type(request.outcome) for request in requests} == {TierUnavailableError}
    # Each request is tried at most once.
    assert 1 <= times <= len(requests)
    dispatcher.close()
    await route.close()
    peer.close()


@pytest.mark.parametrize("more", ["", "cluster=yes", "sentinel=kv"])
async def test_a_plain_client_at_a_tls_port(bench, start_tls, more):
    server = start_tls()
    with pytest.raises(TierUnavailableError) as caught:
        await bench.open(f"{server.url}?{more}")
    assert str(caught.value) == (
        f"127.0.0.1:{server.port} speaks TLS; "
        "write 'rediss:' for 'redis:', or set option 'tls' to true"
    )
    assert not caught.value.retryable


@pytest.mark.parametrize("more", ["", "&cluster=yes", "&sentinel=kv"])
async def test_a_tls_client_at_a_plain_port(bench, server, more):
    with pytest.raises(TierUnavailableError) as caught:
        await bench.open(f"rediss://127.0.0.1:{server.port}?connect_timeout=500ms{more}")
    assert str(caught.value) == (
        f"127.0.0.1:{server.port} does not speak TLS; "
        "write 'redis:' for 'rediss:', or set option 'tls' to false"
    )
    assert not caught.value.retryable


async def test_a_file_that_is_no_certificate(bench, tmp_path):
    (tmp_path / "ca").write_text("none")
    with pytest.raises(ConfigError, match="option 'tls_ca': cannot be used"):
        await bench.open(f"rediss://127.0.0.1:1?tls_ca={tmp_path}/ca")
    with pytest.raises(ConfigError, match="option 'tls_cert': cannot be used: No such file"):
        await bench.open(f"rediss://127.0.0.1:1?tls_cert={tmp_path}/no")


async def test_a_unix_socket(bench, make_server, tmp_path):
    make_server("--unixsocket", str(tmp_path / "s")).start()
    tier = await bench.open(f"redis+unix://{tmp_path}/s?db=2")
    assert await bench.put(tier, *KEYS[:8]) == [None] * 8
    assert await bench.loads(tier, *KEYS[:8])
    with pytest.raises(TierUnavailableError):
        await bench.open(f"redis+unix://{tmp_path}/other")


async def eventually(attempt, server) -> None:
    async with asyncio.timeout(60):
        while not await has_succeeded(attempt):
            await asyncio.to_thread(server.wait_until, lambda: server.ask("PING"), "it answers")
            await asyncio.sleep(0.05)


async def has_succeeded(attempt) -> bool:
    try:
        return await attempt()
    except TierError as error:
        if not error.retryable:
            raise
        return False


def is_up(server) -> bool:
    # Search the reply as text, because only some versions of redis-py parse it.
    return re.search(r"cluster_state\W+ok", str(server.ask("CLUSTER", "INFO"))) is not None


def follows(server) -> bool:
    return server.ask("INFO", "replication").get("master_link_status", "up") == "up"


@pytest.fixture
def sentinel_group(make_server):
    options = ["--requirepass", "secret", "--masterauth", "secret", *AT_ONCE]
    master = make_server(*options)
    replica = make_server(*options, "--replicaof", "127.0.0.1", str(master.port))
    for server in (master, replica):
        server.client_options["password"] = "secret"
        server.start()
    replica.wait_until(lambda: follows(replica), "it follows")
    sentinel = make_server(
        sentinel=f"sentinel monitor kv 127.0.0.1 {master.port} 1\n"
        "sentinel auth-pass kv secret\n"
        # One minute, because a healthy master can be silent for seconds on a busy machine.
        "sentinel down-after-milliseconds kv 60000\n"
        "sentinel failover-timeout kv 2000\n"
        "requirepass guarded"
    )
    sentinel.client_options["password"] = "guarded"
    sentinel.start()
    sentinel.wait_until(
        lambda: (
            "slave0" in replica.ask("INFO", "replication")
            or len(sentinel.ask("SENTINEL", "REPLICAS", "kv")) == 1
        ),
        "it knows the replica",
    )
    return SimpleNamespace(master=master, replica=replica, sentinel=sentinel)


async def open_at(bench, port, **options):
    url = f"redis://:secret@127.0.0.1:{port}?sentinel=kv"
    tier = await bench.open(url, sentinel_password="guarded", **options)
    assert await bench.put(tier, *KEYS[:8]) == [None] * 8
    return tier


async def test_sentinel_and_a_failover(bench, sentinel_group):
    group = sentinel_group
    tier = await open_at(bench, 1, hosts=f"127.0.0.1:{group.sentinel.port}")
    assert await bench.loads(tier, *KEYS[:8])
    assert group.master.ask("EXISTS", bench.name(KEYS[0])) == 1
    group.master.ask("WAIT", 1, 5000)
    group.master.kill()
    group.sentinel.ask("SENTINEL", "SET", "kv", "down-after-milliseconds", 300)

    async def both_ways() -> bool:
        return await bench.put(tier, KEYS[9]) == [None] and await bench.loads(tier, KEYS[9])

    await eventually(both_ways, group.replica)
    assert group.replica.ask("EXISTS", bench.name(KEYS[9])) == 1
    assert await bench.loads(tier, *KEYS[:8])
    assert await bench.has(tier, KEYS[9]) == [True]


async def test_a_master_that_hangs_is_left_for_its_successor(bench, sentinel_group):
    group = sentinel_group
    tier = await open_at(bench, group.sentinel.port)
    group.master.ask("WAIT", 1, 5000)
    group.master.pause()
    group.sentinel.ask("SENTINEL", "SET", "kv", "down-after-milliseconds", 300)
    place = str(group.replica.port).encode()
    await asyncio.to_thread(
        group.sentinel.wait_until,
        lambda: place in group.sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv"),
        "it has another master",
    )

    async def at_the_successor() -> bool:
        # A call to the hung server never ends without a timeout.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                return await bench.loads(tier, *KEYS[:8])
        return False

    assert not await at_the_successor()
    await eventually(at_the_successor, group.replica)


@pytest.mark.parametrize("given_up", ["has", "loads"])
async def test_no_sentinel_is_left_and_the_master_is_well(bench, sentinel_group, given_up):
    group = sentinel_group
    tier = await open_at(bench, group.sentinel.port)
    group.sentinel.kill()
    for _ in range(3):
        group.master.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await getattr(bench, given_up)(tier, *KEYS[:8])
        group.master.resume()
        assert await bench.loads(tier, *KEYS[:8])
        assert await bench.has(tier, *KEYS[:8]) == [True] * 8
        assert await bench.put(tier, KEYS[9]) == [None]


async def test_searches_at_once_forget_no_sentinel(sentinel_group):
    away, alive = ("127.0.0.1", 1), ("127.0.0.1", sentinel_group.sentinel.port)
    sentinels = _Sentinels([away, alive], sentinel_kwargs={"password": "guarded"})
    first, second = sentinels.sentinels
    masters = await asyncio.gather(*(sentinels.find_master("kv") for _ in range(4)))
    assert set(masters) == {("127.0.0.1", sentinel_group.master.port)}
    assert [*map(id, sentinels.sentinels)] == [id(second), id(first)]
    await second.aclose()


async def test_sentinel_does_not_know_the_service(bench, sentinel_group):
    url = f"redis://:secret@127.0.0.1:{sentinel_group.sentinel.port}?sentinel=other"
    with pytest.raises(ConfigError, match=r"is a Sentinel; option 'sentinel' names"):
        await bench.open(f"redis://:guarded@127.0.0.1:{sentinel_group.sentinel.port}")
    with pytest.raises(ConfigError, match="no Sentinel knows 'other'; check option 'sentinel'"):
        await bench.open(url, sentinel_password="guarded")
    # The unreachable Sentinel may know the service, so a retry may succeed.
    with pytest.raises(TierUnavailableError, match="no master of 'other'.*127.0.0.1:1: ") as caught:
        await bench.open(url, sentinel_password="guarded", hosts="127.0.0.1:1")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("password", [{}, {"sentinel_password": "wrong"}])
async def test_sentinel_refuses_the_password(bench, sentinel_group, password):
    port = sentinel_group.sentinel.port
    url = f"redis://:secret@127.0.0.1:{port}?sentinel=kv&hosts=127.0.0.1:1"
    with pytest.raises(TierAuthError, match=f"'sentinel_password'.*127.0.0.1:{port}: ") as caught:
        await bench.open(url, **password)
    assert not caught.value.retryable
    assert len(str(caught.value)) < 200
    assert "secret" not in str(caught.value)


@pytest.fixture
def start_cluster(make_server):
    def start(count: int, replicas: int = 0):
        servers = [make_server("--cluster-enabled", "yes", *AT_ONCE).start() for _ in range(count)]
        nodes = [f"127.0.0.1:{server.port}" for server in servers]
        command = ["redis-cli", "--cluster", "create", *nodes, "--cluster-yes"]
        command += ["--cluster-replicas", str(replicas)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        for server in servers:
            server.wait_until(lambda server=server: is_up(server), "the cluster is up")
            server.wait_until(lambda server=server: follows(server), "it follows")
        return servers

    return start


def keys_at(server, bench):
    slots = {key: server.ask("CLUSTER", "KEYSLOT", bench.name(key)) for key in KEYS}
    return [key for key in KEYS if server.ask("CLUSTER", "COUNTKEYSINSLOT", slots[key])]


async def test_an_acl_user_of_a_cluster_with_what_the_readme_names(bench, start_cluster, rights):
    servers = start_cluster(3)
    commands = [*rights.everywhere, *rights.cluster]
    for server in servers:
        server.ask("ACL", "SETUSER", "kv", "on", ">secret", "~kvtier*", *commands)
    url = f"redis://kv:secret@127.0.0.1:{servers[0].port}?cluster=yes"
    tier = await bench.open(url, ttl="1h", max_age="2h")
    assert await bench.put(tier, *KEYS) == [None] * 120
    assert await bench.loads(tier, *KEYS)
    assert await bench.has(tier, *KEYS) == [True] * 120
    await tier.touch(KEYS)
    assert sorted([entry.key async for entry in tier.scan()]) == KEYS
    assert all(server.ask("DBSIZE") > 40 for server in servers), "the keys are spread"
    assert (await tier.usage()).chunks == 241  # 120 chunks, 120 marks and the manifest
    await tier.delete(KEYS[:60])
    assert await bench.has(tier, *KEYS) == [False] * 60 + [True] * 60
    forever = await bench.open(url)
    await forever.touch(KEYS)


async def test_slots_that_move_are_followed(bench, start_cluster):
    servers = start_cluster(3)
    tier = await bench.open(f"redis://127.0.0.1:1?cluster=yes&hosts=127.0.0.1:{servers[1].port}")
    key = KEYS[0]
    await bench.put(tier, key)
    name = bench.name(key)
    slot = servers[0].ask("CLUSTER", "KEYSLOT", name)
    ids = [bytes(server.ask("CLUSTER", "MYID")).decode() for server in servers]
    (source,) = [
        number
        for number, server in enumerate(servers)
        if server.ask("DBSIZE") and server.ask("CLUSTER", "COUNTKEYSINSLOT", slot)
    ]
    target = (source + 1) % 3
    # Start to migrate the slot, and move this chunk to the new node.
    servers[target].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    servers[source].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    servers[source].ask("MIGRATE", "127.0.0.1", servers[target].port, name, 0, 5000)
    assert await bench.loads(tier, key)  # the old node redirects this request (ASK)
    assert await bench.put(tier, key) == [None]
    for server in servers:
        server.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    assert await bench.loads(tier, key)  # the old node redirects all requests (MOVED)
    assert await bench.put(tier, key) == [None]
    assert await bench.has(tier, key) == [True]


async def test_a_cluster_of_which_no_node_is_left(bench, start_cluster):
    servers = start_cluster(3)
    tier = await bench.open(f"{servers[0].url}?cluster=yes")
    await bench.put(tier, KEYS[0])
    for server in servers:
        server.kill()
    for _ in range(3):
        with pytest.raises(TierUnavailableError):
            await bench.has(tier, *KEYS)
        with contextlib.suppress(TierUnavailableError):
            verdicts = await tier.load([bench.empty(key) for key in KEYS])
            assert {type(verdict) for verdict in verdicts} == {TierUnavailableError}
    with pytest.raises(TierUnavailableError):
        await bench.open(f"{servers[0].url}?cluster=yes")


@pytest.fixture
def broken_cluster(bench, start_cluster):
    servers = start_cluster(3)
    for server in servers:
        server.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
    dead, *alive = servers
    slots = {key: dead.ask("CLUSTER", "KEYSLOT", bench.name(key)) for key in KEYS}
    (first, last), *_ = [
        (piece[0], piece[1]) for piece in dead.ask("CLUSTER", "SLOTS") if piece[2][1] == dead.port
    ]
    lost = [key for key in KEYS if first <= slots[key] <= last]
    return SimpleNamespace(
        dead=dead, alive=alive, lost=lost, kept=[key for key in KEYS if key not in lost]
    )


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_dead_node_costs_its_own_keys_only(bench, broken_cluster, is_new):
    cluster = broken_cluster
    url = f"redis://127.0.0.1:1?cluster=yes&hosts=127.0.0.1:{cluster.alive[0].port}"
    tier = await bench.open(url, ttl="1h")
    assert await bench.put(tier, *KEYS) == [None] * 120
    cluster.dead.kill()
    if is_new:
        # Opening must not fail, even if the manifest is on the dead node.
        tier = await bench.open(url, ttl="1h")
    there = [key in cluster.kept for key in KEYS]
    for _ in range(3):
        assert await bench.has(tier, *KEYS) == there
        batch = [bench.empty(key) for key in KEYS]
        loaded = await tier.load(batch)
        assert [verdict is None for verdict in loaded] == there
        stored = await bench.put(tier, *KEYS)
        assert [verdict is None for verdict in stored] == there
        for verdict in filter(None, [*loaded, *stored]):
            assert type(verdict) is TierUnavailableError
            assert verdict.retryable
        await tier.touch(KEYS)
    assert (await tier.usage()).chunks in (len(cluster.kept), len(cluster.kept) + 1)
    for server in cluster.alive:
        server.ask("FLUSHDB")
    assert await bench.put(tier, *cluster.kept) == [None] * len(cluster.kept)
    # The chunks on the dead node make delete() raise, but all other chunks are deleted.
    with pytest.raises(TierUnavailableError):
        await tier.delete(KEYS)
    # At most the manifest is left. The last store restored it if the manifest's node is alive.
    left = [name for server in cluster.alive for name in server.ask("KEYS", "*")]
    assert all(name.endswith(b".manifest") for name in left)
    # A call fails if only the dead node could answer it.
    for call in (lambda: bench.has(tier, *cluster.lost), lambda: tier.touch(cluster.lost)):
        with pytest.raises(TierUnavailableError):
            await call()
    with pytest.raises(TierUnavailableError):
        _ = [entry async for entry in tier.scan()]


async def test_connections_that_broke_meanwhile_are_an_outage(bench, start_cluster):
    servers = start_cluster(3)
    tier = await bench.open(f"{servers[0].url}?cluster=yes")
    assert await bench.has(tier, *KEYS) == [False] * 120
    for node in tier._route._client.get_nodes():
        for connection in node._connections:
            connection._writer.transport.abort()
    with contextlib.suppress(TierUnavailableError):
        await bench.has(tier, *KEYS)

    async def it_answers() -> bool:
        return await bench.has(tier, *KEYS) == [False] * 120

    await eventually(it_answers, servers[0])


@pytest.mark.parametrize("option", ["cluster=yes", "sentinel=kv"])
async def test_a_server_alone_is_something_else(bench, server, option):
    with pytest.raises(ConfigError, match=f"option '{option.partition('=')[0]}'"):
        await bench.open(f"{server.url}?{option}")


async def test_a_user_who_may_not_ask_for_the_map(bench, make_server):
    server = make_server("--cluster-enabled", "yes").start()
    server.ask("ACL", "SETUSER", "kv", "on", ">secret", "~*", "+@all", "-cluster")
    with pytest.raises(TierAuthError, match="cluster"):
        await bench.open(f"redis://kv:secret@127.0.0.1:{server.port}?cluster=yes")


@pytest.mark.parametrize("given_up", ["has", "loads"])
async def test_a_node_that_hangs_is_left(bench, start_cluster, given_up):
    servers = start_cluster(3)
    hung, heir, other = servers
    tier = await bench.open(f"{heir.url}?cluster=yes")
    await bench.put(tier, *KEYS)
    key = keys_at(hung, bench)[0]
    slot = hung.ask("CLUSTER", "KEYSLOT", bench.name(key))
    heir_id = heir.ask("CLUSTER", "MYID")
    hung.pause()
    for server in (heir, other):
        server.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        server.ask("CLUSTER", "SETSLOT", slot, "NODE", heir_id)
    # A call to the hung server never ends without a timeout.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await getattr(bench, given_up)(tier, key)

    async def at_the_heir() -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                return await bench.put(tier, key) == [None] and await bench.has(tier, key) == [True]
        return False

    await eventually(at_the_heir, heir)


async def test_a_node_that_hangs_delays_no_other(bench, start_cluster, monkeypatch):
    servers = start_cluster(3)
    hung = servers[0]
    # Make redis-py request the map from the hung node first, and wait an hour for the reply.
    monkeypatch.setattr(
        "redis.asyncio.cluster.random.shuffle",
        lambda nodes: nodes.sort(key=lambda node: int(node.port) != hung.port),
    )
    tier = await bench.open(f"{hung.url}?cluster=yes", connect_timeout="1h")
    await bench.put(tier, *KEYS)
    theirs = keys_at(hung, bench)
    others = [key for key in KEYS if key not in theirs]
    hung.pause()
    for given_up in (bench.has, bench.loads):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await given_up(tier, *theirs)
        async with asyncio.timeout(20):
            assert await bench.loads(tier, *others)
            assert await bench.put(tier, *others) == [None] * len(others)


async def test_a_node_that_is_failed_over(bench, start_cluster):
    servers = start_cluster(6, replicas=1)
    tier = await bench.open(f"{servers[1].url}?cluster=yes")
    assert await bench.put(tier, *KEYS) == [None] * 120
    servers[0].kill()
    for server in servers[1:]:
        server.ask("CONFIG", "SET", "cluster-node-timeout", 500)

    async def all_back() -> bool:
        verdicts = await bench.put(tier, *KEYS)
        assert all(verdict is None or verdict.retryable for verdict in verdicts)
        return not any(verdicts) and await bench.loads(tier, *KEYS)

    await eventually(all_back, servers[1])
    assert await bench.has(tier, *KEYS) == [True] * 120
