"""Tools for testing tiers and managers: a conformance kit, injected faults, a virtual clock.

:class:`TierConformance` and :func:`tier_state_machine` need pytest and hypothesis, and are imported
when they are first used. All other names work without these packages.
"""

# ruff: noqa: F403, F405 - __all__ names what the modules of checks define
from typing import TYPE_CHECKING, Any

from kvtier_sdk.testing.conformance.chunks import *
from kvtier_sdk.testing.conformance.concurrency import *
from kvtier_sdk.testing.conformance.lifetime import *
from kvtier_sdk.testing.conformance.optional import *
from kvtier_sdk.testing.conformance.outages import *
from kvtier_sdk.testing.conformance.probe import Probe
from kvtier_sdk.testing.conformance.rules import CHECKS, Check, CheckSkipped, ConformanceError, Hook
from kvtier_sdk.testing.conformance.runners import *
from kvtier_sdk.testing.conformance.subject import TierLike, TierSubject
from kvtier_sdk.testing.faulty import Fault, FaultKind, FaultPlan, FaultyTier, faulty
from kvtier_sdk.testing.inline_runner import InlineRunner
from kvtier_sdk.testing.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from kvtier_sdk.testing.conformance.machine import tier_state_machine
    from kvtier_sdk.testing.conformance.suite import TierConformance

__all__ = [
    "CHECKS",
    "Check",
    "CheckSkipped",
    "ConformanceError",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyTier",
    "Hook",
    "InlineRunner",
    "Probe",
    "TierConformance",
    "TierLike",
    "TierSubject",
    "VirtualClock",
    "check_a_brought_digest_is_right",
    "check_a_cancelled_call_ends",
    "check_a_cancelled_load_writes_nothing_more",
    "check_a_cancelled_store_leaves_no_part",
    "check_a_cancelled_store_reads_nothing_more",
    "check_a_full_tier_refuses_or_makes_room",
    "check_a_hang_is_no_miss",
    "check_a_lost_part_is_a_miss",
    "check_a_reported_removal_is_true",
    "check_a_store_replaces_on_demand",
    "check_a_tier_comes_back_after_a_hang",
    "check_a_tier_comes_back_after_an_outage",
    "check_absent_is_not_found",
    "check_an_empty_batch_is_no_results",
    "check_an_expired_chunk_is_absent",
    "check_an_outage_in_mid_transfer_damages_nothing",
    "check_an_outage_is_no_miss",
    "check_another_length_is_corrupt",
    "check_bad_settings_fail_in_open",
    "check_big_batches",
    "check_buffers_at_any_address",
    "check_chunks_of_any_length",
    "check_chunks_outlive_the_instance",
    "check_close_ends",
    "check_close_ends_what_runs",
    "check_closing_twice_is_harmless",
    "check_concurrent_stores_leave_one_whole_object",
    "check_delete_forgets",
    "check_groups_are_apart",
    "check_instances_are_independent",
    "check_it_runs_in_a_process",
    "check_it_runs_in_a_thread",
    "check_keys_of_any_bytes",
    "check_lookup_tells_stored_from_absent",
    "check_maintenance_makes_no_namespace",
    "check_maintenance_records_no_use",
    "check_namespaces_are_apart",
    "check_namespaces_are_listed",
    "check_no_buffer_is_kept",
    "check_no_descriptor_is_left",
    "check_no_partly_written_object_is_visible",
    "check_no_task_is_left",
    "check_no_thread_is_left",
    "check_no_use_extends_the_maximum_age",
    "check_objects_of_any_length",
    "check_one_failure_fails_alone",
    "check_only_tier_errors_are_raised",
    "check_processes_share_a_place",
    "check_results_have_the_length_of_the_batch",
    "check_results_have_the_order_of_the_batch",
    "check_scan_lists_what_is_stored",
    "check_similar_keys_are_apart",
    "check_store_leaves_its_buffers_alone",
    "check_storing_twice_is_harmless",
    "check_the_loop_is_never_blocked",
    "check_touch_changes_nothing",
    "check_usage_counts_what_is_stored",
    "check_what_is_stored_comes_back",
    "faulty",
    "tier_state_machine",
]

# Maps each name that needs the extra ``testing`` to the module that defines it.
_NEEDS_EXTRA = {
    "TierConformance": "kvtier_sdk.testing.conformance.suite",
    "tier_state_machine": "kvtier_sdk.testing.conformance.machine",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_NEEDS_EXTRA[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs {error.name}: pip install 'kvtier-sdk[testing]'",
            name=error.name,
        ) from error
