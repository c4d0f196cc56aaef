"""Functions for a fuzzer, each of which reads bytes that others wrote."""
