from __future__ import annotations

import os
import socket
import subprocess
import sys

from kvtier_sdk.processes import listener_of

LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    print("listens", flush=True)
    sys.stdin.read()
"""


def test_each_address_of_a_port_has_its_own_process() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as ours:
        port = ours.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", LISTEN, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            assert other.stdout.readline() == b"listens\n"
            assert f"process {os.getpid()} " in str(listener_of("::1", port))
            assert f"process {other.pid} " in str(listener_of("127.0.0.1", port))
            assert listener_of("127.0.0.2", port) is None
            assert listener_of("0.0.0.0", port) is not None
            other.stdin.close()


def test_a_listener_on_all_addresses_is_in_the_way_of_each() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as ours:
        for host in ("127.0.0.1", "::1", "0.0.0.0", "::"):
            assert f"process {os.getpid()} " in str(listener_of(host, ours.getsockname()[1]))


def test_a_host_without_an_address_has_no_listener() -> None:
    assert listener_of("no such host", 80) is None
