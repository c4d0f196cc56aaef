"""The tiers that come with the SDK."""
