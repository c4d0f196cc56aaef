"""Ways to store and load chunks, measured beside each other."""
