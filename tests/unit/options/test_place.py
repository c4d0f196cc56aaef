from __future__ import annotations

from kvtier_sdk.options.place import nearest


def test_nearest_lists_what_is_known() -> None:
    assert nearest("rdis", ["s3", "redis"], "installed") == (
        "did you mean 'redis'? installed: redis, s3"
    )
    assert nearest("zzz", ["s3"], "installed") == "installed: s3"
    assert nearest("zzz", [], "installed") == "installed: none"
