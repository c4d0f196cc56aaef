"""The interface of codecs, which encrypt and authenticate a tier's chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class ChunkCodec(ABC):
    """A cipher that seals chunks on their way to a tier and opens them on their way back.

    Install a codec under the entry point ``kvtier.codecs``, for example as ``my_cipher``. A tier's
    option ``codec = "my_cipher:argument"`` then selects it. The tier handles only sealed chunks.

    Rules for every codec:

    - *Sealing keeps a payload's length.* Anything else that opening needs, such as a salt and a
      tag, goes into the envelope, a part of the chunk's header.
    - *A payload is authenticated*, together with the associated data: the key of the chunk, its
      namespace and its header. :meth:`open` raises if any bit of these has changed since
      :meth:`seal`. The SDK computes no digest of a sealed chunk.
    - *A codec is pure*: its methods run in several threads at once, do no I/O, and keep no buffer.
    - *A codec shows no secret* in its ``repr`` or its errors.
    - *A name stands for one encoding.* The name is a fact of the tier's namespace, so chunks of
      different codecs are kept apart. An incompatible encoding needs a new name.

    Attributes:
        envelope_bytes: length of the envelope in bytes.

    Args:
        argument: the text after the codec's name and a colon; ``None`` if there is no colon.

    Raises:
        ValueError: the argument is missing, or this codec cannot use it.
    """

    envelope_bytes: ClassVar[int]

    def __init__(self, argument: str | None) -> None:
        if argument is not None:
            raise ValueError(f"takes no argument, not {argument!r}")

    @abstractmethod
    def seal(
        self, associated: bytes, payload: memoryview, sealed: memoryview, envelope: memoryview
    ) -> None:
        """Encrypt ``payload`` into ``sealed``, and fill ``envelope``; do not modify ``payload``.

        ``sealed`` is as long as ``payload``. :meth:`open` receives the same ``associated`` data.
        """

    @abstractmethod
    def open(
        self, associated: bytes, envelope: memoryview, sealed: memoryview, payload: memoryview
    ) -> None:
        """Decrypt and verify ``sealed`` into ``payload``, with the ``envelope`` from the tier.

        Raises:
            ChunkAuthError: ``sealed``, ``envelope`` and the ``associated`` data do not belong
                together, or the codec lacks the secret key. ``payload`` is then undefined.
        """
