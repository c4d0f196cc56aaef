"""Reads the configuration of a tier or of a manager, and finds conflicts between tiers."""
