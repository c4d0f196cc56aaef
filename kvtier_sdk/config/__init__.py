"""Configurations: a tier's entry, and the whole, with conflicts between its tiers."""
