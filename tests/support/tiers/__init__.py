"""Tiers for tests: broken tiers, odd tiers, and the shelf tier that is their base class."""
