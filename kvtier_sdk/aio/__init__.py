"""Asyncio building blocks: the clock, blocking calls, connections and sharded calls."""
