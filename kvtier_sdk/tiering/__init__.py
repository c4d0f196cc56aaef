"""The tiering manager and the client of a single tier; both run in the engine's thread."""
