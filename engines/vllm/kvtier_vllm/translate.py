"""Translation between vLLM's types and kvtier's: requests, media, events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import Locality as EngineLocality
from vllm.v1.kv_offload.base import Medium as EngineMedium
from vllm.v1.kv_offload.base import OffloadingEvent as EngineEvent
from vllm.v1.kv_offload.base import OffloadPolicy, RequestOffloadingContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_sdk import Medium, OffloadingEvent, RequestContext, SecondaryTierManager
from kvtier_sdk.engine import PRIMARY, ChunkNote, read_request
from kvtier_vllm import compat

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext


def engine_place(
    place: type[SecondaryTierManager] | OffloadingEvent,
) -> tuple[EngineMedium, EngineLocality]:
    """Return the medium and the locality of a tier or an event, as vLLM's types."""
    return EngineMedium(place.medium.value), EngineLocality(place.locality.value)


def cache_hit_source(medium: Medium) -> CacheHitSource:
    """Return the source under which vLLM counts hits on this medium."""
    return CacheHitSource.HOST if medium is Medium.CPU else CacheHitSource.DISK


def offloading_context(*, whole_requests: bool) -> RequestOffloadingContext:
    policy = OffloadPolicy.REQUEST_LEVEL if whole_requests else OffloadPolicy.CHUNK_LEVEL
    return RequestOffloadingContext(policy=policy)


def request_context(engine_request: ReqContext, request_id: str | None = None) -> RequestContext:
    envelope = getattr(engine_request, "kv_hints", None)
    actions = [] if envelope is None else envelope.actions
    request = read_request(
        request_id or engine_request.req_id,
        engine_request.kv_transfer_params,
        [(action.action_type, action.payload) for action in actions],
    )
    return replace(request, trace_headers=compat.trace_headers(engine_request))


def chunk_note(blocks: Any) -> ChunkNote:
    """Return a chunk's description for routers, made from vLLM's metadata of its blocks."""
    parent = blocks.parent_block_hash
    return ChunkNote(
        block_hashes=[int.from_bytes(block[-8:], "big") for block in blocks.block_hashes],
        parent_hash=None if parent is None else int.from_bytes(parent[-8:], "big"),
        token_ids=list(blocks.token_ids),
        block_tokens=blocks.block_size,
        lora_name=blocks.lora_name,
        kind=blocks.kv_cache_spec.kv_cache_spec_kind,
    )


def engine_event(event: OffloadingEvent) -> EngineEvent:
    medium, locality = engine_place(event)
    return EngineEvent(
        keys=list(event.keys),
        medium=medium,
        removed=event.removed,
        locality=locality,
        ownership=None if event.tier == PRIMARY else event.tier,
    )
