"""``python -m kvtier_sdk.cli`` is ``kvtier``."""

from kvtier_sdk.cli import main

main()
