"""Tiers for tests: broken ones, odd ones, and the shelf that both stand on."""
