"""Readers of bytes that others wrote, as functions that a fuzzer calls."""
