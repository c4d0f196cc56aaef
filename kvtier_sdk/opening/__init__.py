"""Opens host pools, managers and tiers for engines and for tools."""
