"""Causes faults in real servers and file systems under load, and measures the effects."""
