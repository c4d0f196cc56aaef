"""The compiled coder of payloads, which releases the interpreter lock.

``kind`` is a number of :mod:`kvtier_sdk.codecs.planes`. Both functions raise :class:`ValueError` if
a kind, a length or an alignment is impossible.
"""

def encode(kind: int, payload: memoryview, stored: memoryview, alignment: int, /) -> int:
    """Code ``payload`` into ``stored``; return the coded length, or 0 if it gains too little."""

def decode(kind: int, memory: memoryview, stored_bytes: int, payload_bytes: int, /) -> bool:
    """Decode in place; return false if the coded payload is malformed."""
