"""The server's own limits, which bound what the tier keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ADVICE = (
    "set 'maxmemory' and 'maxmemory-policy allkeys-lru', in its configuration or by CONFIG SET"
)


def limit_problem(facts: Mapping[str, Any], has_ttl: bool) -> str | None:
    """Explain why a server will not make room for new chunks, or return ``None``."""
    if "maxmemory" not in facts:
        return None
    policy = str(facts.get("maxmemory_policy"))
    if not facts["maxmemory"]:
        if has_ttl:
            return None
        return f"the server has no memory limit, so chunks fill its machine; {_ADVICE}"
    if policy == "noeviction" or (policy.startswith("volatile-") and not has_ttl):
        return (
            f"the server evicts no chunk (maxmemory-policy {policy}), so stores fail once it is "
            f"full; {_ADVICE}"
        )
    return None
