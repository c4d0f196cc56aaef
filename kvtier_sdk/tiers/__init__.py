"""The tiers that come with the core."""
