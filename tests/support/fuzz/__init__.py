"""Fuzzes the functions that read bytes from others."""
