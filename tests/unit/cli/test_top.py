from __future__ import annotations

from pathlib import Path
from typing import Any

from support.command import kvtier
from support.live import live
from support.runners import KEYS


def test_what_hits_have_saved_is_told_by_tier(tmp_path: Path) -> None:
    options: dict[str, Any] = {"admin_socket": str(tmp_path / "engine.sock"), "slots": 8}
    facts: dict[str, object] = {"model": "m", "dtype": "bfloat16", "tokens_per_chunk": 500}
    with live(["memory:?compress=always"], namespace=facts, **options) as engine:

        def notes() -> list[str]:
            done = kvtier("top", options["admin_socket"], "--once", "--interval", "100ms")
            assert done.returncode == 0, done.stderr
            return done.stdout.splitlines()[5:]

        engine.manager.stats[0].recompute_s = None
        request = engine.begin("r")
        engine.store(request, *KEYS[:8])
        (compressed,) = notes()
        assert compressed.startswith("memory: compressed to ")
        engine.load(request, *KEYS[:3])
        saved = "saved: 1,500 tokens, the time is not known yet: host 100%, memory 0%"
        assert notes() == [saved, compressed]
        engine.manager.stats[0].recompute_s = 40.0
        engine.step()
        assert notes()[0] == "saved: 1,500 tokens, 2 min of computing: host 100%, memory 0%"
