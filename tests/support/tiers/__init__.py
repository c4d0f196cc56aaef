"""Tiers for tests: broken tiers, odd tiers, and their base class, the shelf tier."""
