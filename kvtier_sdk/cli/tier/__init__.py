"""The commands of ``kvtier tier``. Engines may use the tiers at the same time."""
