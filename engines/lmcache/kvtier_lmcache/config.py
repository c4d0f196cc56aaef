"""The configuration that LMCache's plugin loader makes from ``adapter_params``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Self

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvtier_sdk import ConfigError, TierSpec
from kvtier_sdk.engine import AdapterOptions, Place

#: The key of kvtier's options in LMCache's configuration. Error messages begin with the key.
ADAPTER_PARAMS = Place("adapter_params")
_FP8 = "float8_e4m3fn"


class KVTierL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """The configuration of a :class:`KVTierL2Adapter`.

    Attributes:
        tier: the tier that stores the objects.
        options: the adapter's own options in ``adapter_params``, without the tier's options.
        serde: the serialization that LMCache applies to objects before a store, if any.
    """

    def __init__(self, tier: TierSpec, options: AdapterOptions, serde: str | None = None) -> None:
        self.tier = tier
        self.options = options
        self.serde = serde

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Read ``adapter_params``: a tier's entry, and the adapter's own options."""
        tier, options = AdapterOptions.read(d, ADAPTER_PARAMS)
        return cls(tier, options, _serde_beside(d))

    @classmethod
    def help(cls) -> str:
        """Describe ``adapter_params`` for LMCache's command line."""
        return (
            "adapter_params of kvtier:\n"
            "- url (str): the tier, such as file:///data/kv?capacity=200GiB or redis://cache/0\n"
            "- any option of the backend and of every tier, here or in the URL's query "
            "('kvtier backends' lists them)\n"
            f"- {', '.join(AdapterOptions.option_names())} (optional)"
        )


def _serde_beside(params: Mapping[str, Any]) -> str | None:
    """Return the serde that is configured beside ``adapter_params``."""
    # The adapter needs the serde, because a lookup's layout describes tensors before serialization.
    # LMCache does not pass the serde to an adapter, so search the stack frames of its loader.
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        for local in list(frame.f_locals.values()):
            if getattr(local, "adapter_params", None) is params:
                return _supported(getattr(local, "serde_config", None))
    return None


def _supported(serde: Any) -> str | None:
    if serde is None:
        return None
    if serde.type != "fp8":
        raise ConfigError(
            f'"serde" of type {serde.type!r} is not supported, since lookups do not tell the '
            'length of its objects: leave it out, or give {"type": "fp8"}; to seal chunks, give '
            f'"codec": "aes-gcm:KEYFILE" in {ADAPTER_PARAMS}'
        )
    return f"fp8 {serde.kwargs.get('fp8_dtype', _FP8)}"
