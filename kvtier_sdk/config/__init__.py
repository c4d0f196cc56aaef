"""Reads the configurations of tiers and managers, and finds conflicts between tiers."""
