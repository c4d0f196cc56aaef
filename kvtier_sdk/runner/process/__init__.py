"""Runs a tier in a separate process."""
