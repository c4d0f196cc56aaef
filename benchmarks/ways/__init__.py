"""Ways to store and load chunks, measured side by side."""
