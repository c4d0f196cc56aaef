import mmap
import os
from pathlib import Path

from kvtier_sdk import Region
from kvtier_sdk.testing import TierSubject


def listening_ports() -> list[int]:
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                ports.append(int(local.rpartition(":")[2], 16))
    return ports


async def test_no_peer_reads_the_host_pool_over_tcp(store):
    from mooncake.engine import TransferEngine

    subject = TierSubject(store.url)
    async with subject.opened() as probe:
        header, _ = probe.full(b"key").transfer.regions
        ports = listening_ports()
        peer = TransferEngine()
        assert peer.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        memory = mmap.mmap(-1, mmap.PAGESIZE)

        def can_read(port: int) -> bool:
            place = f"127.0.0.1:{port}"
            return (
                peer.transfer_sync_read(place, Region.of(memory).address, header.address, 64) == 0
            )

        assert ports
        assert not any(map(can_read, ports))
        # The same read succeeds once the memory is registered, so `can_read` detects an exposure.
        probe.tier._client.register_buffer(*subject.memory.region)
        assert any(map(can_read, ports))
