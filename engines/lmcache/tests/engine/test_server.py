import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.lmcache_server import LMCacheServer


def test_the_command_of_the_page_starts_a_server_with_the_tier_in_a_process(tmp_path: Path) -> None:
    with LMCacheServer(tmp_path) as server:
        text = json.dumps(server.status())
    assert '"type": "KVTierL2Adapter"' in text
    assert '"runner": "process"' in text
    assert '"is_healthy": false' not in text
    assert "runs in threads" not in server.log()


@pytest.mark.parametrize("align_bytes", [None, 4096])
def test_lmcaches_own_benchmark_runs_over_a_tier(tmp_path: Path, align_bytes: int | None) -> None:
    adapter = {
        "type": "plugin",
        "module_path": "kvtier_lmcache",
        "class_name": "KVTierL2Adapter",
        "adapter_params": {"url": f"file://{tmp_path}/kv?direct_io=off"},
    }
    program = Path(sys.executable).with_name("lmcache")
    command = [program, "bench", "l2", "--l2-adapter", json.dumps(adapter), "--no-skip-verify"]
    command += ["--lookup-max-hit-rate", "1"]
    if align_bytes is not None:
        command += ["--l1-align-bytes", str(align_bytes)]
    ran = subprocess.run(command, capture_output=True, text=True)
    said = ran.stdout + ran.stderr
    if align_bytes is None:
        assert ran.returncode
        assert "give --l1-align-bytes 4096" in said
    else:
        assert not ran.returncode, said
        assert "data verified OK" in said
