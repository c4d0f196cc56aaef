"""The conformance kit: one check of a tier for each rule of the contract."""

# Import these modules, because each registers its checks in CHECKS.
from kvtier_sdk.testing.conformance import (  # noqa: F401
    chunks,
    concurrency,
    lifetime,
    optional,
    outages,
    runners,
)
