"""Ways to store and load chunks, to measure side by side."""
