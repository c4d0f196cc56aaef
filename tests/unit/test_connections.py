"""The connection pool: how many there are, which one is lent, and which are not kept."""

from __future__ import annotations

import asyncio

import pytest

from kvtier_sdk import ConnectionPool


class Line:
    """A connection that is as usable as the test says."""

    def __init__(self) -> None:
        self.is_usable = True
        self.closed_for: str | None = None

    def close(self, reason: str) -> None:
        self.is_usable = False
        self.closed_for = reason


class Server:
    """Dials, and remembers what it has dialled."""

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


async def test_a_connection_is_lent_again(server: Server) -> None:
    pool = ConnectionPool(server.dial, 2)
    for _ in range(3):
        async with pool.borrow() as line:
            assert line is server.lines[0]


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


async def test_one_that_broke_is_not_kept(server: Server) -> None:
    pool = ConnectionPool(server.dial, 1)
    async with pool.borrow() as line:
        line.close("it broke")
    async with pool.borrow() as line:
        assert line is server.lines[1]


async def test_one_that_breaks_while_nobody_has_it_is_not_lent(server: Server) -> None:
    pool = ConnectionPool(server.dial, 1)
    async with pool.borrow():
        pass
    server.lines[0].close("the server went away")
    async with pool.borrow() as line:
        assert line is server.lines[1]


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
