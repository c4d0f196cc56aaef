"""Faults of real servers and file systems under load, as scenarios that are played and measured."""
