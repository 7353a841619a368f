"""The numbers of the cache manager and the scheduler as metric samples; read when ``/metrics`` is."""

from __future__ import annotations

from collections.abc import Mapping

from common.engine.speculation import Speculation
from common.engine.tokens.ahead import AheadSteps
from common.kv_cache.observe.stats import CacheStats
from common.metrics.metrics import Samples
from common.models.vision.encoder import EncoderStats


def cache_samples(
    stats: CacheStats,
    *,
    running: int,
    waiting: int,
    waiting_for_peer: int,
    preemptions: int,
    grammars_waiting: int,
    transfers_in_flight: int,
    step_seconds: Mapping[str, float],
    images: EncoderStats | None,
) -> Samples:
    """Samples of the metrics that are counted where they happen, by the metric's name."""
    checkpoints: dict[tuple[str, ...], float] = {}
    for event, counts in (
        ("saved", stats.checkpoints_saved),
        ("skipped", stats.checkpoints_skipped),
        ("evicted", stats.checkpoints_evicted),
    ):
        checkpoints.update({(event, reason): value for reason, value in counts.items()})
    return {
        "requests_running": {(): running},
        "requests_waiting": {(): waiting},
        "requests_waiting_for_peer": {(): waiting_for_peer},
        "prefix_cache_query_tokens_total": {(): stats.query_tokens},
        "prefix_cache_hit_tokens_total": _labelled(stats.hit_tokens),
        "prefix_cache_lost_tokens_total": _labelled(stats.lost_tokens),
        "kv_blocks": _pool_states(stats.blocks),
        "state_slots": _pool_states(stats.slots),
        "checkpoints_total": checkpoints,
        "evictions_total": _labelled(stats.evictions),
        "preemptions_total": {(): preemptions},
        "grammars_waiting": {(): grammars_waiting},
        "transfers_in_flight": {(): transfers_in_flight},
        "step_seconds_total": _labelled(step_seconds),
        **_image_samples(images if images is not None else EncoderStats()),
        "leases": {("active",): stats.leases_active},
        "leases_expired_total": {(): stats.leases_expired},
    }


def ahead_samples(steps: AheadSteps | None) -> Samples:
    """Samples of the steps of a node with steps that are launched ahead."""
    return {} if steps is None else {"async_scheduling_steps_total": _labelled(steps.counts)}


def draft_samples(speculation: Speculation | None) -> Samples:
    """Samples of what was drafted; of a node that drafts nothing the metrics have none."""
    if speculation is None:
        return {}
    by_place = _labelled({str(place): value for place, value in enumerate(speculation.num_accepted_by_place)})
    return {
        "spec_decode_num_drafts_total": {(): speculation.num_drafts},
        "spec_decode_num_draft_tokens_total": {(): speculation.num_draft_tokens},
        "spec_decode_num_accepted_tokens_total": {(): speculation.num_accepted_tokens},
        "spec_decode_num_accepted_tokens_per_pos_total": by_place,
    }


def _image_samples(stats: EncoderStats) -> Samples:
    return {
        "images_encoded_total": {("computed",): stats.num_encoded, ("cache",): stats.num_found},
        "image_encode_seconds_total": {(): stats.seconds},
        "mm_encoder_cache_bytes": {(): stats.num_bytes},
    }


def _labelled(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(label,): value for label, value in counts.items()}


def _pool_states(states: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {("used" if state == "held" else state,): value for state, value in states.items()}
