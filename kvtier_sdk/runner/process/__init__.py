"""A tier in a process of its own."""
