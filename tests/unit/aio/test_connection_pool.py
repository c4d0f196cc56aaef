from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvtier_sdk import ConnectionPool, TierUnavailableError


class Line:
    def __init__(self) -> None:
        self.is_usable = True
        self.closed_for: str | None = None

    def close(self, reason: str) -> None:
        self.is_usable = False
        self.closed_for = reason


class Server:
    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.refuses = False

    async def dial(self) -> Line:
        if self.refuses:
            raise ConnectionRefusedError
        self.lines.append(Line())
        return self.lines[-1]


@pytest.fixture
def server() -> Server:
    return Server()


async def test_the_one_that_was_used_last_goes_first(server: Server) -> None:
    pool = ConnectionPool(server.dial, 2)
    async with pool.borrow() as first, pool.borrow():
        pass
    async with pool.borrow() as line:
        assert line is first


async def test_no_more_than_the_limit_are_lent(server: Server) -> None:
    pool = ConnectionPool(server.dial, 2)
    lent = 0
    most = 0

    async def use() -> None:
        nonlocal lent, most
        async with pool.borrow():
            lent += 1
            most = max(most, lent)
            await asyncio.sleep(0)
            lent -= 1

    await asyncio.gather(*(use() for _ in range(9)))
    assert most == len(server.lines) == 2


async def test_a_refused_dial_keeps_nobody_out(server: Server) -> None:
    pool = ConnectionPool(server.dial, 1)
    server.refuses = True
    with pytest.raises(ConnectionRefusedError):
        async with pool.borrow():
            raise AssertionError("lent nothing")
    server.refuses = False
    async with pool.borrow() as line:
        assert line.is_usable


async def test_a_borrower_that_is_cancelled_keeps_nobody_out(server: Server) -> None:
    pool = ConnectionPool(server.dial, 1)

    async def wait_for_ever() -> None:
        async with pool.borrow():
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(wait_for_ever()) for _ in range(2)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with pool.borrow() as line:
        assert line.is_usable


@pytest.mark.parametrize("failure", [ValueError, asyncio.CancelledError])
async def test_after_a_failure_it_is_not_lent(server: Server, failure: type[BaseException]) -> None:
    pool = ConnectionPool(server.dial, 1)
    with pytest.raises(failure):
        async with pool.borrow():
            raise failure
    assert server.lines[0].closed_for == "its borrower failed"
    async with pool.borrow() as line:
        assert line is server.lines[1]


async def test_after_a_lost_connection_the_next_borrower_gets_a_new_one(server: Server) -> None:
    pool = ConnectionPool(server.dial, 3)
    async with pool.borrow(), pool.borrow(), pool.borrow() as idle:
        pass
    with pytest.raises(TierUnavailableError):
        async with pool.borrow():
            raise TierUnavailableError("closed by the server")
    assert idle.closed_for == "another connection was lost"
    async with pool.borrow() as line:
        assert line is server.lines[3]


async def test_one_that_is_not_usable_is_closed(server: Server) -> None:
    pool = ConnectionPool(server.dial, 1)
    async with pool.borrow() as broken:
        broken.is_usable = False
    assert broken.closed_for is not None
    async with pool.borrow() as stale:
        assert stale is server.lines[1]
    stale.is_usable = False
    async with pool.borrow() as line:
        assert stale.closed_for is not None
        assert line is server.lines[2]


class Borrowers:
    def __init__(self, pool: ConnectionPool[Line]) -> None:
        self._pool = pool
        #: Names of the tasks that got a connection, in order.
        self.lent: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(self, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._use(name))
        await self._settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await self._settle()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _use(self, name: str) -> None:
        async with self._pool.borrow(for_store=name.startswith("store")):
            self.lent.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.lent.remove(name)

    async def _settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def borrowers(server: Server) -> AsyncIterator[Borrowers]:
    borrowers = Borrowers(ConnectionPool(server.dial, 4))
    yield borrowers
    await borrowers.close()


async def test_stores_leave_half_of_the_connections_to_reads(borrowers: Borrowers) -> None:
    await borrowers.begin("store 1", "store 2", "store 3", "store 4")
    assert borrowers.lent == ["store 1", "store 2"]
    await borrowers.begin("load 1", "load 2")
    assert borrowers.lent == ["store 1", "store 2", "load 1", "load 2"]
    for name in ("store 3", "store 4"):
        await borrowers.cancel(name)
    for name in ("store 1", "store 2"):
        await borrowers.end(name)
    await borrowers.begin("load 3", "load 4", "load 5")
    assert borrowers.lent == ["load 1", "load 2", "load 3", "load 4"], "reads may have them all"


async def test_a_store_whose_turn_comes_waits_behind_the_reads(borrowers: Borrowers) -> None:
    await borrowers.begin("store 1", "store 2", "load 1", "load 2", "store 3", "load 3", "load 4")
    await borrowers.end("store 1")
    assert borrowers.lent == ["store 2", "load 1", "load 2", "load 3"]
    await borrowers.end("load 1")
    await borrowers.end("load 2")
    assert borrowers.lent == ["store 2", "load 3", "load 4", "store 3"], "and is not left out"


async def test_stores_that_are_cancelled_keep_no_store_out(borrowers: Borrowers) -> None:
    await borrowers.begin("store 1", "store 2", "store 3", "load 1", "load 2")
    await borrowers.begin("load 3")
    await borrowers.end("store 1")  # "load 3" gets this connection; "store 3" waits in line
    for name in ("store 2", "store 3"):
        await borrowers.cancel(name)
    await borrowers.begin("store 4", "store 5")
    assert borrowers.lent == ["load 1", "load 2", "load 3", "store 4"]
    await borrowers.end("load 1")
    assert borrowers.lent == ["load 2", "load 3", "store 4", "store 5"]


async def test_of_one_connection_a_store_has_its_turn(server: Server) -> None:
    pool = ConnectionPool(server.dial, 1)
    for for_store in (True, False, True):
        async with pool.borrow(for_store=for_store) as line:
            assert line is server.lines[0]


async def test_a_closed_pool_keeps_none(server: Server) -> None:
    pool = ConnectionPool(server.dial, 2)
    async with pool.borrow() as lent:
        async with pool.borrow() as idle:
            pass
        pool.close()
        assert idle.closed_for == "the tier was closed"
        assert lent.is_usable, "its borrower is not interrupted"
    assert lent.closed_for == "the tier was closed"
    pool.close()
