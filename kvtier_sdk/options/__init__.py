"""Strict options: models, URLs, units, secrets, files, and their description."""
