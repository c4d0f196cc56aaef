"""A pool that does not fit into /dev/shm raises an error, and never causes a fatal SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MIB = 1 << 20


def run_with_shm(size_bytes: int, program: str) -> None:
    """Run a program with a private /dev/shm; skip the test if namespaces are not allowed."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    mount = f"mount -t tmpfs -o size={size_bytes} tmpfs /dev/shm"
    if subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace of its own: 'unshare --mount' is refused here")
    done = subprocess.run(
        [*unshare, "sh", "-c", f"{mount} && exec {sys.executable} -P -"],
        input=textwrap.dedent(program),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    assert done.returncode == 0, done.stderr


def test_a_pool_that_is_larger_than_shared_memory_is_refused() -> None:
    run_with_shm(
        32 * MIB,
        """
        import os, re
        from kvtier_sdk import ConfigError, HostPool, PoolLayout

        try:
            HostPool.join("one", PoolLayout(10, 4 << 20))
        except ConfigError as error:
            said = str(error)
        assert said == (
            "the host pool needs 40 MiB, and 32 MiB are free in /dev/shm: make the pool smaller, "
            "or make /dev/shm larger (docker run --shm-size, in Kubernetes an emptyDir of medium "
            "Memory)"
        ), said
        assert os.listdir("/dev/shm") == []
        HostPool.join("one", PoolLayout(7, 4 << 20)).close()
        # A pool without a name is anonymous memory, which /dev/shm does not limit.
        HostPool.create(PoolLayout(10, 4 << 20)).close()
        """,
    )


def test_memory_that_goes_while_a_pool_is_made_is_an_error() -> None:
    run_with_shm(
        32 * MIB,
        """
        import mmap, os
        from kvtier_sdk import ConfigError
        from kvtier_sdk.pool import memory

        for name, way in {
            "prefault": lambda: memory.prefault(mapping, fd),
            "reserve": lambda: memory.reserve(fd, len(mapping)),
        }.items():
            fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
            os.ftruncate(fd, 40 << 20)
            mapping = mmap.mmap(fd, 40 << 20)
            try:
                way()
            except ConfigError as error:
                assert "40 MiB were free, but other processes took them" in str(error), error
            else:
                raise AssertionError(name)
            mapping.close()
            os.close(fd)
        """,
    )


def test_no_page_is_missing_once_a_pool_is_made() -> None:
    """The first write to a page without memory would kill the process with SIGBUS."""
    run_with_shm(
        48 * MIB,
        """
        import os
        from kvtier_sdk import HostPool, PoolLayout

        pool = HostPool.join("one", PoolLayout(10, 4 << 20))
        fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
        try:
            while True:
                os.write(fd, bytes(1 << 20))
        except OSError as error:
            print(error)
        for slot in range(10):
            pool.view(slot)[:] = bytes([slot]) * (4 << 20)
        os.close(fd)
        pool.close()
        """,
    )
