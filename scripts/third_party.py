"""Write the table of docs/third-party.md from the records in docs/third-party/.

    python scripts/third_party.py [--run]

With --run, first make the records of this project's backends: start the servers of the tests, and
run 'kvtier conformance' against each backend.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/third-party.md"
RECORDS = ROOT / "docs/third-party"
_HEAD = "| backend | package | result | date | kvtier | Python |\n" + "| --- " * 6 + "|\n"


def page() -> str:
    before, head, after = PAGE.read_text().partition(_HEAD)
    _, _, rest = after.partition("\n\n")
    return before + head + "\n".join(map(_row, sorted(RECORDS.glob("*.json")))) + "\n\n" + rest


def _row(file: Path) -> str:
    record = json.loads(file.read_text())
    result = f"[{record['summary']}](third-party/{file.name})"
    package = f"{record['package']} {record['version']}"
    facts = record["date"], record["kvtier_sdk"], record["python"]
    return f"| {' | '.join((record['backend'], package, result, *facts))} |"


@contextmanager
def _stores() -> Iterator[dict[str, tuple[str, str]]]:
    """Start the servers; yield each backend's URL, and the value of ``--outages`` or ``""``."""
    sys.path.append(str(ROOT / "tests"))
    from support.azurite import ACCOUNT, CONTAINER, KEY, Azurite
    from support.mooncake_store import MooncakeStore
    from support.redis_server import Server
    from support.s3_front import S3Front
    from support.s3_server import S3Server

    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (place / "redis").mkdir()
        redis, mooncake = Server(place / "redis"), MooncakeStore(place / "mooncake")
        for server in (redis, mooncake):
            stack.callback(server.kill)
            server.start()
        s3 = stack.enter_context(S3Server(place / "s3"))
        front = stack.enter_context(S3Front(s3.port))
        azurite = stack.enter_context(Azurite(place / "azurite"))
        account = {"endpoint": azurite.endpoint, "account_name": ACCOUNT, "account_key": KEY}
        yield {
            "file": (f"file://{place / 'kv'}?min_free=0", ""),
            "memory": ("memory:", ""),
            "mooncake": (mooncake.url, ""),
            "obstore": (
                f"az://{CONTAINER}/chunks?{urlencode(account)}",
                urlsplit(azurite.endpoint).netloc,
            ),
            "redis": (redis.url, urlsplit(redis.url).netloc),
            "s3": (s3.tier_url(endpoint=front.endpoint), urlsplit(front.endpoint).netloc),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true")
    if parser.parse_args().run:
        kvtier = Path(sys.executable).with_name("kvtier")
        with _stores() as stores:
            for name, (url, address) in stores.items():
                record = RECORDS / f"kvtier-{name}.json"
                outages = ["--outages", address] if address else []
                subprocess.run(
                    [kvtier, "conformance", url, *outages, "--json", record], check=False
                )
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
