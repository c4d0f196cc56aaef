"""Asyncio building blocks: the clock, blocking calls, connections, objects in pieces."""
