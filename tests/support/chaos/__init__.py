"""Plays faults of real servers and file systems under load, and measures their effects."""
