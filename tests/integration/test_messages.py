"""Messages for common mistakes and for a healthy start, compared with `messages.txt`.

``make messages`` rewrites the file. Review its diff before you commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.author import ROOT
from support.mistakes import MISTAKES, print_mistake, print_start
from support.redis_server import Server
from support.s3_server import S3Server

FILE = Path(__file__).with_name("messages.txt")
#: An engine's starts, in order. Each start has a title, and changes some namespace facts.
STARTS: dict[str, dict[str, str]] = {
    "A healthy start in an empty place": {},
    "The next start in the same place": {},
    "A start with another seed of the hashes in the same place": {"hash_seed": "1"},
}


@pytest.fixture
def places(
    tmp_path: Path, faulty_site: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    monkeypatch.syspath_prepend(faulty_site)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    server = Server(tmp_path / "redis", "--requirepass", "right")
    server.client_options["password"] = "right"
    server.start()
    try:
        with S3Server(tmp_path / "s3") as s3:
            yield {
                "dir": str(tmp_path),
                "redis": str(server.port),
                "endpoint": s3.endpoint,
                "s3": s3.tier_url().partition("?")[2],
                "ada": "region=us-east-1&access_key_id=ada&secret_access_key=hunter2",
            }
    finally:
        server.kill()


def test_the_page_for_operators_has_these_messages() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("<!-- messages: ")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    printed = FILE.read_text(encoding="utf-8")
    assert len(quoted) >= 20
    assert [message for message in quoted if message not in printed] == []


def test_messages(places: dict[str, str]) -> None:
    printed = {title: print_mistake(text, places) for title, text in MISTAKES.items()}
    printed |= {title: print_start(places, **facts) for title, facts in STARTS.items()}
    text = "\n\n".join(f"# {title}\n{lines}" for title, lines in printed.items()) + "\n"
    assert "hunter2" not in text
    # Cut the list of options, because every new option would change this message.
    text = re.sub("allowed: admission, .*", "allowed: ...", text)
    if os.environ.get("KVTIER_WRITE_MESSAGES"):
        FILE.write_text(text, encoding="utf-8")
    assert text == FILE.read_text(encoding="utf-8")
