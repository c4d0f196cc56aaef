"""Tiers for tests: broken ones, odd ones, and the shelf tier that both derive from."""
