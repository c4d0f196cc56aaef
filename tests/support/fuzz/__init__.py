"""Everything that reads what others wrote, as functions of bytes that a fuzzer calls."""
