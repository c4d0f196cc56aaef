"""Asyncio building blocks: the clock, blocking calls, connections, calls by shard."""
