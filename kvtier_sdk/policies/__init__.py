"""Eviction policies of the primary tier, and store policies of the others."""
