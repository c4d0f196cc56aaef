"""Eviction policies for the primary tier, and store policies for the secondary tiers."""
