"""Asyncio building blocks: the clock, blocking calls, connections."""
