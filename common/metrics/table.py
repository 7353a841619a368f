"""The names a dashboard relies on: every metric of every process, as data.

``Metrics`` builds its collectors from this table, and documentation is checked against it. Names are without the prefix
``tandem_``; every metric also has the label ``role``. A *sourced* metric is not counted by ``Metrics``: its values
are read from the owner's plain integers when somebody scrapes. Label values come from small fixed sets, never from
requests.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "tandem_"


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    PROXY = "proxy"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


NODES = frozenset({Role.PREFILL, Role.DECODE})
ALL = NODES | {Role.PROXY}
PROXY = frozenset({Role.PROXY})

# Bounds of the histograms' buckets. 1 ms to 2 min: first tokens, transfers and phases of small and large models.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# Whole requests last longer: up to 20 min.
REQUEST_SECONDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1200.0,
)
# Of an event loop: finer round the 100 ms that bodies may take.
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
# Gaps between tokens: 1 ms to 10 s, finer where a reader notices.
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
# Actual over estimated: 1 is right, to both sides up to a factor of 10.
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
# Shares by which a prediction was wrong.
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
# Memory ranges of one pull: neighbouring blocks are one range.
DESCRIPTORS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. ``name`` is the exposed one without prefix, so a counter's ends in ``_total``."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    roles: frozenset[Role] = ALL
    sourced: bool = False
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str, roles: frozenset[Role] = ALL, sourced: bool = False) -> MetricSpec:
    return MetricSpec(name, Kind.COUNTER, text, labels, roles, sourced)


def _gauge(name: str, text: str, *labels: str, roles: frozenset[Role] = ALL, sourced: bool = True) -> MetricSpec:
    return MetricSpec(name, Kind.GAUGE, text, labels, roles, sourced)


def _histogram(
    name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS, roles: frozenset[Role] = ALL
) -> MetricSpec:
    return MetricSpec(name, Kind.HISTOGRAM, text, labels, roles, False, buckets)


METRICS: tuple[MetricSpec, ...] = (
    _counter("requests_total", "Requests that ended, by route and outcome.", "route", "outcome"),
    _gauge("requests_running", "Requests being worked on."),
    _gauge("requests_waiting", "Requests in the queue."),
    _gauge(
        "requests_waiting_for_peer",
        "Of those in the queue, requests whose prompt another node computes and has handed over no part of: they wait "
        "for that node, not for this one.",
        roles=NODES,
    ),
    _histogram("request_ttft_seconds", "Time from arrival to the first token."),
    _histogram("request_itl_seconds", "Time between two tokens of a request.", buckets=GAP_SECONDS),
    _histogram("request_e2e_seconds", "Time from arrival to the last token.", buckets=REQUEST_SECONDS),
    _histogram("request_phase_seconds", "Time in one phase of a request.", "phase"),
    _counter("prompt_tokens_total", "Prompt tokens, by where their state came from.", "source", roles=NODES),
    _counter("prompts_tokenised_total", "Prompts that this process turned into token ids."),
    _counter("unknown_fields_total", "Fields of requests that nobody here knows; they change nothing.", "route"),
    _counter("generation_tokens_total", "Tokens generated.", roles=NODES),
    _counter(
        "prefix_cache_query_tokens_total",
        "Prompt tokens looked up in the prefix cache.",
        roles=NODES,
        sourced=True,
    ),
    _counter(
        "prefix_cache_hit_tokens_total", "Prompt tokens found, by cache group.", "group", roles=NODES, sourced=True
    ),
    _counter(
        "prefix_cache_lost_tokens_total",
        "Prompt tokens found in one group and computed again, by reason.",
        "reason",
        roles=NODES,
        sourced=True,
    ),
    _gauge("kv_blocks", "KV blocks, by state; the null block is not counted.", "state", roles=NODES),
    _gauge("state_slots", "State slots, by state; the null slot is not counted.", "state", roles=NODES),
    _counter("checkpoints_total", "Checkpoints, by event and reason.", "event", "reason", roles=NODES, sourced=True),
    _counter("evictions_total", "Cache entries evicted, by group.", "group", roles=NODES, sourced=True),
    _counter(
        "images_encoded_total",
        "Images that prompts needed vectors of: computed by the vision tower, or kept from an earlier prompt.",
        "source",
        roles=NODES,
        sourced=True,
    ),
    _counter("image_encode_seconds_total", "Time in the vision tower.", roles=NODES, sourced=True),
    _gauge("mm_encoder_cache_bytes", "Vectors of images that are kept.", roles=NODES),
    _counter("images_refused_total", "Requests refused because of an image, by reason.", "reason"),
    _counter("preemptions_total", "Requests whose memory the scheduler took back.", roles=NODES, sourced=True),
    _counter(
        "step_seconds_total", "Time of the engine's steps, by what they computed.", "kind", roles=NODES, sourced=True
    ),
    _counter(
        "async_scheduling_steps_total",
        "Steps of an engine with --async-scheduling, by how they came to be launched.",
        "order",
        roles=NODES,
        sourced=True,
    ),
    _histogram(
        "step_time_error_ratio",
        "Share by which the predicted time of an engine's step was wrong.",
        "kind",
        buckets=ERRORS,
        roles=NODES,
    ),
    _counter("spec_decode_num_drafts_total", "Drafts that were run.", roles=NODES, sourced=True),
    _counter("spec_decode_num_draft_tokens_total", "Drafted tokens that were run.", roles=NODES, sourced=True),
    _counter("spec_decode_num_accepted_tokens_total", "Of them, tokens that were right.", roles=NODES, sourced=True),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Drafted tokens that were right, by their place in the draft.",
        "position",
        roles=NODES,
        sourced=True,
    ),
    _counter("grammar_checks_total", "Grammars of requests that were tried, by result.", "result"),
    _histogram("grammar_check_seconds", "Time until a grammar was found good or bad, in a process of its own."),
    _gauge("grammars_waiting", "Grammars that are checked or compiled now, or wait for it."),
    _histogram("grammar_compile_seconds", "Time of compiling a grammar for the vocabulary.", roles=NODES),
    _histogram("grammar_mask_seconds", "Time of a step's masks, beside its forward.", roles=NODES),
    _counter("transfer_bytes_total", "Payload moved between nodes.", "direction", "kind", roles=NODES),
    _gauge("transfers_in_flight", "Pulls whose data is being read, or may still be written.", roles=NODES),
    _histogram("transfer_seconds", "Time of one pull, validation included.", roles=NODES),
    _histogram("transfer_descriptors", "Memory ranges in one pull.", buckets=DESCRIPTORS, roles=NODES),
    _counter("transfer_early_parts_total", "Parts of prompts read while later ones were still computed.", roles=NODES),
    _counter("transfer_failures_total", "Pulls that gave nothing, by reason.", "reason", roles=NODES),
    _counter(
        "source_queries_total", "Questions to other nodes for a prefix by content, by result.", "result", roles=NODES
    ),
    _counter("agent_recreations_total", "New transfer agents, made to end reads that did not end.", roles=NODES),
    _gauge("tier_objects", "Prefixes and extents in a tier.", "tier", roles=NODES),
    _gauge("tier_used_bytes", "Bytes in a tier, headers included.", "tier", roles=NODES),
    _gauge("tier_size_bytes", "Bytes that a tier may hold.", "tier", roles=NODES),
    _counter("tier_bytes_total", "Payload read from a tier, and bytes written to it.", "tier", "op", roles=NODES),
    _counter("tier_hit_tokens_total", "Prompt tokens read from a tier that memory lacked.", "tier", roles=NODES),
    _counter(
        "tier_skipped_total",
        "Prefixes that were evicted and are not in the tier, by reason.",
        "tier",
        "reason",
        roles=NODES,
        sourced=True,
    ),
    _counter(
        "tier_read_errors_total",
        "Objects of a tier that could not be used: computed again, and deleted where they are bad.",
        "tier",
        "reason",
        roles=NODES,
    ),
    _counter("tier_write_errors_total", "Prefixes that a tier could not take.", "tier", "reason", roles=NODES),
    _histogram("tier_read_seconds", "Time of reading and checking a prefix.", "tier", roles=NODES),
    _gauge("leases", "Leases, by state.", "state", roles=NODES),
    _counter("leases_expired_total", "Leases that ended by their deadline.", roles=NODES, sourced=True),
    _counter("late_reads_rejected_total", "Pulls thrown away: the memory had changed.", roles=NODES),
    _counter("proxy_decisions_total", "Placements chosen, by policy.", "policy", "placement", roles=PROXY),
    _counter(
        "proxy_elastic_placements_total",
        "Placements in which a node takes the other role's work, by that work.",
        "work",
        roles=PROXY,
    ),
    _counter(
        "proxy_targets_total",
        "Streams with a target, by target and by whether it was kept.",
        "target",
        "kept",
        roles=PROXY,
    ),
    _gauge(
        "proxy_recommended_nodes",
        "Nodes of each role that the load of the last minute asks for, not rounded. Of several proxies: the sum "
        "for prefill, the maximum for decode.",
        "node_role",
        roles=PROXY,
    ),
    _histogram(
        "proxy_predicted_ttft_seconds",
        "Estimated time from a stream's placement to its first byte.",
        "placement",
        roles=PROXY,
    ),
    _histogram(
        "proxy_ttft_ratio",
        "Actual over estimated time from a stream's placement to its first byte.",
        "placement",
        buckets=RATIOS,
        roles=PROXY,
    ),
    _counter("proxy_retries_total", "Legs sent again before the first byte, by reason.", "reason", roles=PROXY),
    _counter("proxy_retries_refused_total", "Legs not sent again: the retry budget was spent.", roles=PROXY),
    _counter(
        "proxy_migrations_total",
        "Streams that did not end where they began, by what became of them.",
        "outcome",
        roles=PROXY,
    ),
    _gauge(
        "prefix_index_entries", "Blocks and checkpoints that the proxy knows of a node's cache.", "node", roles=PROXY
    ),
    _counter("prefix_index_snapshots_total", "Node caches read as a whole, at first and after gaps.", roles=PROXY),
    _counter("requests_dropped_total", "Requests that admission turned away, by reason.", "reason", roles=PROXY),
    _gauge("node_up", "1 while the node answers (also while it drains), else 0.", "node", roles=PROXY),
    _gauge("breaker_state", "A node's circuit breaker: 0 closed, 1 half-open, 2 open.", "node", roles=PROXY),
    _counter("breaker_opened_total", "How often a node's breaker opened.", "node", roles=PROXY, sourced=True),
    _histogram(
        "event_loop_lag_seconds",
        "How late the event loop woke, looked at 40 times a second: everything in the process waits so long.",
        "cause",
        buckets=LAG_SECONDS,
    ),
    _gauge("build_info", "Always 1; versions as labels.", "version", "torch", "transformers", "nixl", sourced=False),
)

METRICS_BY_NAME: Mapping[str, MetricSpec] = {spec.name: spec for spec in METRICS}
