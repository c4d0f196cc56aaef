"""Strict options: models, URLs, units, secrets and files."""
