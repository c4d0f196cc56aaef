"""The measured programs and clients. Each is a way to store and load chunks."""
