"""The interface of codecs, which encrypt and authenticate a tier's chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class ChunkCodec(ABC):
    """A cipher that seals chunks on their way to a tier and opens them on their way back.

    Install a codec under the entry point ``kvtier.codecs``, for example as ``my_cipher``. A tier's
    option ``codec = "my_cipher:argument"`` then selects the codec. The tier handles sealed chunks
    like all others.

    Rules for every codec:

    - *A sealed payload is as long as the payload.* Further data for opening it, such as a salt and
      a tag, goes into the envelope, a part of the chunk's header.
    - *A payload is authenticated*, together with the associated data: the key of the chunk, its
      namespace and its header. :meth:`open` raises if any bit of these has changed since
      :meth:`seal`. The SDK computes no digest of a sealed chunk.
    - *A codec is pure*: its methods are called in several threads at once, keep no buffer when
      they return, and do no I/O.
    - *A codec shows no secret* in its ``repr`` or its errors.
    - *A name stands for one encoding.* The name is a fact of the tier's namespace, so chunks of
      different codecs are kept apart. An encoding that older releases cannot read needs a new
      name.

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
        """Seal a ``payload``, which must not be modified.

        Args:
            associated: the associated data, which the SDK also passes to :meth:`open`.
            payload: the content.
            sealed: the memory for the sealed payload, of the same length.
            envelope: the memory for the envelope.
        """

    @abstractmethod
    def open(
        self, associated: bytes, envelope: memoryview, sealed: memoryview, payload: memoryview
    ) -> None:
        """Open a sealed payload.

        Args:
            associated: the chunk's associated data, the same as for :meth:`seal`.
            envelope: the envelope that the tier has loaded.
            sealed: the sealed payload that the tier has loaded.
            payload: the memory for the content, which may hold anything after an error.

        Raises:
            ChunkAuthError: the arguments do not belong together, or the codec lacks the secret key.
        """
