"""The tiering manager and the client of a single tier, which run in the engine's thread."""
