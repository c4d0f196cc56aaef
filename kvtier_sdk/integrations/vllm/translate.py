"""vLLM's words for ours: requests, media, events. Enum members are vLLM's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import Locality as EngineLocality
from vllm.v1.kv_offload.base import Medium as EngineMedium
from vllm.v1.kv_offload.base import OffloadingEvent as EngineEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_sdk.events import PRIMARY, OffloadingEvent
from kvtier_sdk.types import Locality, Medium, RequestContext

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext


def engine_medium(medium: Medium) -> EngineMedium:
    """vLLM's member for a medium."""
    return EngineMedium(medium.value)


def cache_hit_source(medium: Medium) -> CacheHitSource:
    """As what vLLM counts hits of a tier on this medium."""
    return CacheHitSource.HOST if medium is Medium.CPU else CacheHitSource.DISK


def engine_locality(locality: Locality) -> EngineLocality:
    """vLLM's member for a locality."""
    return EngineLocality(locality.value)


def request_context(engine_request: ReqContext, request_id: str | None = None) -> RequestContext:
    """A request as tiers see it.

    Args:
        engine_request: as vLLM describes it.
        request_id: under which it is known here; vLLM's id where absent.

    Returns:
        Its context; ``params`` are vLLM's ``kv_transfer_params``.
    """
    return RequestContext(
        request_id or engine_request.req_id, params=engine_request.kv_transfer_params or {}
    )


def engine_event(event: OffloadingEvent) -> EngineEvent:
    """An event as vLLM publishes it.

    Args:
        event: ours.

    Returns:
        vLLM's; events of a secondary tier name it as their owner.
    """
    return EngineEvent(
        keys=list(event.keys),
        medium=engine_medium(event.medium),
        removed=event.removed,
        locality=engine_locality(event.locality),
        ownership=None if event.tier == PRIMARY else event.tier,
    )
