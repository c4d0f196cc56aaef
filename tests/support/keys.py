from __future__ import annotations

from pathlib import Path

OURS, THEIRS, NEXT = (byte * 32 for byte in (b"\x11", b"\x22", b"\x33"))


def write_keys(path: Path, *keys: bytes) -> str:
    path.touch(mode=0o600)
    path.write_text("# written by hand\n\n" + "".join(f"{key.hex()}\n" for key in keys))
    return f"aes-gcm:{path}"
