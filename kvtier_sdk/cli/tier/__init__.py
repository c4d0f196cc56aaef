"""``kvtier tier``: one module per command. Engines may use the tiers at the same time."""
