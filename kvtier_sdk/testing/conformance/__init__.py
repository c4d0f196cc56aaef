"""The conformance kit: one check of a tier for each rule of the contract."""

# The import of these modules fills CHECKS.
from kvtier_sdk.testing.conformance import (  # noqa: F401
    chunks,
    concurrency,
    lifetime,
    optional,
    outages,
    runners,
)
