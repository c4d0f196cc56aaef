"""Runs ``kvtier`` for ``python -m kvtier_sdk.cli``."""

from kvtier_sdk.cli import main

main()
