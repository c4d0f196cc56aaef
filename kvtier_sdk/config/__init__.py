"""A configuration: one tier's entry, conflicts between entries, the whole."""
