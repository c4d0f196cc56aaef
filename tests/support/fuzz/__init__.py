"""A fuzzer of the functions that read untrusted bytes."""
