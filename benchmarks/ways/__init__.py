"""The programs and clients that the benchmarks measure, each a way to store and load chunks."""
