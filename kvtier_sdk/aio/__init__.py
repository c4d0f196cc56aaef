"""Asyncio building blocks: the clock, blocking calls and connections."""
