"""Eviction policies of the primary tier."""
