"""The report of all benchmarks: what is run, the page that says it, and its plots."""
