"""The report of all benchmarks: the runs, the page with their figures, and its plots."""
