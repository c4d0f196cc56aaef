"""The configuration that LMCache's plugin loader makes of ``adapter_params``."""

from __future__ import annotations

from typing import Any, Self

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.integrations.options import AdapterOptions
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.options.place import Place

#: The options' place in LMCache's configuration.
ADAPTER_PARAMS = Place("adapter_params")


class KVTierL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """The configuration of a :class:`KVTierL2Adapter`.

    Attributes:
        tier: the tier.
        options: how the adapter uses it.
    """

    def __init__(self, tier: TierSpec, options: AdapterOptions) -> None:
        self.tier = tier
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Self:
        """Read ``adapter_params``: a tier's entry, and the options of the adapter.

        Raises:
            ConfigError: an option is wrong or missing.
            BackendError: the backend cannot be found or loaded.
        """
        entry = ADAPTER_PARAMS.table(d)
        options = AdapterOptions.take_from(entry)
        return cls(
            TierSpec.from_options(entry, where=str(ADAPTER_PARAMS)),
            validate_options(AdapterOptions, options, ADAPTER_PARAMS),
        )

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
