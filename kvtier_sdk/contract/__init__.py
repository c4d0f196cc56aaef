"""The interfaces that extensions implement: tiers, codecs, store policies, eviction policies."""

from kvtier_sdk.contract.codec import ChunkCodec as ChunkCodec
from kvtier_sdk.contract.policies import EvictionPolicy as EvictionPolicy
from kvtier_sdk.contract.policies import StoreMoment as StoreMoment
from kvtier_sdk.contract.policies import StorePolicy as StorePolicy
from kvtier_sdk.contract.tier import CONTRACT_RELEASES as CONTRACT_RELEASES
from kvtier_sdk.contract.tier import CONTRACT_VERSION as CONTRACT_VERSION
from kvtier_sdk.contract.tier import ChunkTierManager as ChunkTierManager
from kvtier_sdk.contract.tier import ReportRemoved as ReportRemoved
from kvtier_sdk.contract.tier import SecondaryTierManager as SecondaryTierManager
from kvtier_sdk.contract.tier import TierContext as TierContext
from kvtier_sdk.contract.tier import TierCounter as TierCounter
from kvtier_sdk.contract.tier import TierGauge as TierGauge
from kvtier_sdk.contract.tier import TierMetrics as TierMetrics
